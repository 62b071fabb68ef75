// Runs CUDA C++ kernel source on the CPU, to find bugs, not to be quick (g++ -std=c++17, glibc).
//
// One fibre for each thread of a block; blocks run one after another on one system thread.
//  * Shared memory is filled with NaN before each block, so that a missing initialisation shows.
//  * Threads run in forward, reversed or shuffled order, or one warp as far as it gets before the next
//    begins, so that a missing barrier shows.
//  * A barrier reached from two source lines, or by some threads only, ends the program.
//  * Asynchronous copies land at the wait that covers them, so that a missing wait shows; where warps
//    run one by one they land at once, so that memory that is still read shows.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

using std::max;
using std::min;

#define CUDA_ON_CPU 1
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
// All static shared arrays of a module lie in one section, so that one memset poisons them.
#define __shared__ static __attribute__((section("cushared")))
extern "C" char __start_cushared[] __attribute__((weak));
extern "C" char __stop_cushared[] __attribute__((weak));

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
template <class T> struct alignas(2 * sizeof(T)) Pair { T x, y; };
template <class T> struct alignas(4 * sizeof(T)) Four { T x, y, z, w; };
using int2 = Pair<int>;
using int4 = Four<int>;
using float2 = Pair<float>;
using float4 = Four<float>;
inline dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace fibres {

enum State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };

struct Copy {
  void* to;
  const void* from;  // null: zeros
  int bytes, group;
};

struct Fibre {
  ucontext_t context;
  jmp_buf place;
  char* stack;
  State state;
  int line;
  dim3 index;
  bool started;
  std::vector<Copy> copies;
  int committed;
  unsigned char slot[32];  // what this lane shows the others of its warp
};

constexpr size_t STACK_BYTES = 128 << 10;
inline std::vector<Fibre> all;
inline int current, count;
inline bool warp_by_warp;
inline jmp_buf scheduler;
inline std::function<void()> body;
inline std::vector<char> dynamic_shared;

[[noreturn]] inline void die(const char* what, int a = 0, int b = 0) {
  std::fprintf(stderr, "cuda_on_cpu: %s (%d, %d) in block (%u, %u, %u), thread %d\n", what, a, b,
               blockIdx.x, blockIdx.y, blockIdx.z, current);
  std::abort();
}

inline void entry() {
  body();
  all[current].state = DONE;
  _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void wait(State state, int line) {
  Fibre& own = all[current];
  own.state = state;
  own.line = line;
  if (!_setjmp(own.place)) _longjmp(scheduler, 1);
}

inline void resume(int thread) {  // until it waits or ends
  current = thread;
  Fibre& fibre = all[thread];
  threadIdx = fibre.index;
  if (_setjmp(scheduler)) return;
  if (fibre.started) _longjmp(fibre.place, 1);
  fibre.started = true;
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = fibre.stack;
  fibre.context.uc_stack.ss_size = STACK_BYTES;
  fibre.context.uc_link = nullptr;
  makecontext(&fibre.context, entry, 0);
  setcontext(&fibre.context);
}

// Let the threads [low, high) go on if all of them that live wait at one barrier.
inline bool release(int low, int high, State barrier) {
  int line = -1, waiting = 0;
  for (int t = low; t < high; ++t) {
    if (all[t].state == DONE) continue;
    if (all[t].state != barrier) return false;
    if (line >= 0 && all[t].line != line) die("barriers of different lines meet", line, all[t].line);
    line = all[t].line;
    ++waiting;
  }
  if (barrier == AT_BLOCK_BARRIER && waiting && waiting < high - low)
    die("a thread has ended before the barrier of line", line, waiting);
  for (int t = low; t < high; ++t)
    if (all[t].state == barrier) all[t].state = READY;
  return waiting > 0;
}

inline void run_block(int order, std::mt19937& random) {
  std::memset(__start_cushared, 0xFF, __stop_cushared - __start_cushared);
  std::memset(dynamic_shared.data(), 0xFF, dynamic_shared.size());
  std::vector<int> turns(count);
  std::iota(turns.begin(), turns.end(), 0);
  if (order == 1) std::reverse(turns.begin(), turns.end());
  for (Fibre& fibre : all) {
    fibre.state = READY;
    fibre.started = false;
    fibre.copies.clear();
    fibre.committed = 0;
  }
  for (;;) {
    if (order == 2) std::shuffle(turns.begin(), turns.end(), random);
    bool ran = false, alive = false, released = false;
    for (int t : turns)
      if (all[t].state == READY) {
        resume(t);
        ran = true;
        if (warp_by_warp && t % 32 == 31) break;  // the first ready warp again, if it got ready
      }
    for (int warp = 0; warp < count; warp += 32)
      released |= release(warp, min(warp + 32, count), AT_WARP_BARRIER);
    for (const Fibre& fibre : all) alive |= fibre.state != DONE;
    if (!alive) return;
    if (!released && !ran && !release(0, count, AT_BLOCK_BARRIER)) die("deadlock");
  }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}

template <class... A>
void launch(void (*kernel)(A...), const unsigned* grid, const unsigned* block, size_t shared_bytes,
            int order, unsigned seed, void** arguments) {
  std::mt19937 random(seed);
  warp_by_warp = order == 3;
  count = block[0] * block[1] * block[2];
  if (count > 1024) die("too many threads in a block", count);
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  dynamic_shared.assign(shared_bytes + 128, 0);
  while ((int)all.size() > count) {
    std::free(all.back().stack);
    all.pop_back();
  }
  while ((int)all.size() < count) {
    all.emplace_back();
    all.back().stack = (char*)std::aligned_alloc(64, STACK_BYTES);
  }
  for (unsigned t = 0; t < (unsigned)count; ++t)
    all[t].index = {t % block[0], t / block[0] % block[1], t / (block[0] * block[1])};
  body = [=] { call(kernel, arguments, std::index_sequence_for<A...>{}); };
  const unsigned blocks = grid[0] * grid[1] * grid[2];
  for (unsigned i = 0; i < blocks; ++i) {
    const unsigned b = order == 1 ? blocks - 1 - i : i;
    blockIdx = {b % grid[0], b / grid[0] % grid[1], b / (grid[0] * grid[1])};
    run_block(order, random);
  }
}

inline int lane() { return current & 31; }

// Every lane of a warp gives a value and reads that of lane `source`.
template <class T> T exchange(T value, int source, int line) {
  static_assert(sizeof(T) <= 32);
  const int first = current & ~31;
  std::memcpy(all[current].slot, &value, sizeof(T));
  wait(AT_WARP_BARRIER, line);
  T found = value;
  if (source >= 0 && source < 32 && first + source < count)
    std::memcpy(&found, all[first + source].slot, sizeof(T));
  wait(AT_WARP_BARRIER, line);
  return found;
}

// Each lane gives a value; returns those of all lanes of its warp.
template <class T> std::array<T, 32> of_warp(const T& own, int line) {
  static_assert(sizeof(T) <= 32);
  std::array<T, 32> found;
  const int first = current & ~31;
  std::memcpy(all[current].slot, &own, sizeof own);
  wait(AT_WARP_BARRIER, line);
  for (int lane = 0; lane < 32; ++lane)
    std::memcpy(&found[lane], all[first + lane].slot, sizeof own);
  wait(AT_WARP_BARRIER, line - 1);
  return found;
}
// Copies of all groups but the last `pending` arrive.
inline void land(int pending) {
  Fibre& own = all[current];
  std::vector<Copy> rest;
  for (const Copy& copy : own.copies) {
    if (copy.group >= own.committed - pending) rest.push_back(copy);
    else if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
    else std::memset(copy.to, 0, copy.bytes);
  }
  own.copies = rest;
}

}  // namespace fibres

// -- what kernels may call -------------------------------------------------------------------------

#define __syncthreads() ::fibres::wait(::fibres::AT_BLOCK_BARRIER, __LINE__)
#define __syncwarp(...) ::fibres::wait(::fibres::AT_WARP_BARRIER, __LINE__)

template <class T> T __shfl_down_sync(unsigned, T value, int distance, int width = 32) {
  const int lane = fibres::lane();
  const bool inside = (lane & (width - 1)) + distance < width;
  return fibres::exchange(value, inside ? lane + distance : lane, -1);
}
template <class T> T __shfl_sync(unsigned, T value, int source, int = 32) {
  return fibres::exchange(value, source & 31, -5);
}
template <class T> T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return fibres::exchange(value, fibres::lane() ^ mask, -2);
}
// Whole numbers only: sums of floats would depend on the order of the threads.
template <class T> T atomicAdd(T* place, T value) {
  static_assert(std::is_integral<T>::value, "atomics on floats are not deterministic");
  const T old = *place;
  *place = old + value;
  return old;
}
template <class T> T __ldg(const T* place) { return *place; }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// -- the instructions that kernels/prelude.cuh writes in PTX ---------------------------------------

inline float half_to_float(unsigned short bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return (float)value;
}
// The float next to a sum toward zero, as tensor cores round.
inline float toward_zero(double sum) {
  const float found = (float)sum;
  const bool beyond = std::isfinite(found) && std::fabs((double)found) > std::fabs(sum);
  return beyond ? std::nextafterf(found, 0.0f) : found;
}
// cvt.rn.f16.f32 of two numbers.
inline unsigned two_halves(float low, float high) {
  const _Float16 halves[2] = {(_Float16)low, (_Float16)high};
  unsigned both;
  std::memcpy(&both, halves, 4);
  return both;
}
inline float half_of(unsigned both, int which) {
  return half_to_float((unsigned short)(both >> 16 * which));
}
// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32: D = A B + C. Products are exact, their sum is cut.
inline void mma_half(float* d, const unsigned* a, const unsigned* b, const float* c) {
  struct Fragment {
    unsigned a[4], b[2];
  };
  const auto of = fibres::of_warp(Fragment{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, -13);
  const int group = fibres::lane() >> 2, quarter = fibres::lane() & 3;
  for (int r = 0; r < 4; ++r) {
    const int row = group + (r >> 1) * 8, column = quarter * 2 + (r & 1);
    double sum = c[r];
    for (int k = 0; k < 16; ++k) {
      const unsigned x = of[(row & 7) * 4 + (k % 8) / 2].a[(row >> 3) + 2 * (k >> 3)];
      const unsigned y = of[column * 4 + (k % 8) / 2].b[k >> 3];
      sum += (double)half_of(x, k & 1) * half_of(y, k & 1);
    }
    d[r] = toward_zero(sum);
  }
}
// A place in shared memory.
typedef uintptr_t Place;
inline Place place_of(void* shared) { return (Place)shared; }
inline Place aligned_place(Place place, int bytes, const char* what) {
  if (place % bytes) fibres::die(what, (int)(place % bytes), bytes);
  return place;
}
// ldmatrix.x4.trans: the rows of matrix m begin at the places of lanes 8 m to 8 m + 7; lane l receives
// rows 2 (l % 4) and the next of column l / 4.
inline void load_turned(unsigned* found, Place row) {
  const auto of = fibres::of_warp(aligned_place(row, 16, "misaligned matrix"), -15);
  const int lane = fibres::lane();
  for (int m = 0; m < 4; ++m) {
    unsigned short parts[2];
    for (int e = 0; e < 2; ++e)
      std::memcpy(&parts[e], (char*)of[8 * m + 2 * (lane % 4) + e] + 2 * (lane / 4), 2);
    found[m] = parts[0] | (unsigned)parts[1] << 16;
  }
}
// ldmatrix.x4: as above, but lane l receives columns 2 (l % 4) and the next of row l / 4.
inline void load_rows(unsigned* found, Place row) {
  const auto of = fibres::of_warp(aligned_place(row, 16, "misaligned matrix"), -17);
  const int lane = fibres::lane();
  for (int m = 0; m < 4; ++m) std::memcpy(&found[m], (char*)of[8 * m + lane / 4] + 4 * (lane % 4), 4);
}
inline void store_two(Place to, unsigned a, unsigned b) {
  const unsigned both[2] = {a, b};
  std::memcpy((void*)aligned_place(to, 8, "misaligned store"), both, 8);
}
// cp.async of 16 bytes; zeros where `there` is false.
inline void copy_16_async(Place to, const void* from, bool there) {
  aligned_place(to, 16, "misaligned copy");
  aligned_place((Place)from, 16, "misaligned copy");
  fibres::Fibre& own = fibres::all[fibres::current];
  void* place = (void*)to;
  if (!fibres::warp_by_warp) own.copies.push_back({place, there ? from : nullptr, 16, own.committed});
  else if (there) std::memcpy(place, from, 16);
  else std::memset(place, 0, 16);
}
inline void commit_copies() { ++fibres::all[fibres::current].committed; }
template <int PENDING> void wait_for_copies() { fibres::land(PENDING); }
