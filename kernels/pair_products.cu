// Products of patches from pairs of half-precision numbers (pair_stage.cu), on tensor cores.
//
// Feature f = tap * channels + channel of a patch z at output o sees pixel o * stride + tap * dilation -
// begin, or zero outside the image. A tile of 64 features has one tap. A block multiplies 2 x COLUMNS
// tiles over the positions [begin, end) of a grid, and writes each product that is wanted as a part, for
// moment.cu. If the images of pairs are patches already, their features are the channels of one tap.
//
//   layers  images of several layers as pairs; the channels are multiples of 64, and the pairs of a layer
//           are fewer than 2^31 half-precision numbers
//   jobs    one for each block
//   grids   boxes of output positions, counted image by image in row-major order
//   parts   (products, 64, 64)
//
// A thread copies 16 bytes (8 features) of one position at a time, and a position advances by DEPTH
// without divisions. Copies fill STAGES stages of shared memory in turn. No atomics.
//
//   COLUMNS  tiles of a block along the columns, 1 or 2; 2 need an even number of tiles of a tap
#ifndef COLUMNS
#define COLUMNS 2
#endif
#define ROWS 2                       // tiles of a block along the rows
#define WARP_ROWS 2                  // warps along both sides of a block
#define WARP_COLUMNS (2 * COLUMNS)
#define THREADS (32 * WARP_ROWS * WARP_COLUMNS)
#define DEPTH (THREADS / 8)          // positions of a stage: a thread copies one
#define STAGES 3
#define SEATS (ROWS + COLUMNS)       // tiles in shared memory
#define SLOT (DEPTH * TILE)          // half-precision numbers of a tile: of its high parts, or its low parts
#define SEAT (PARTS * SLOT)
#define STAGE (SEATS * SEAT)
#define BLOCKS_M (ROWS * TILE / WARP_ROWS / 16)  // 16 x 8 products of a warp
#define BLOCKS_N (COLUMNS * TILE / WARP_COLUMNS / 8)
// Blocks of a multiprocessor: its shared memory has room for two where it is largest.
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
#define RESIDENT (4 / COLUMNS)
#else
#define RESIDENT (2 / COLUMNS)
#endif

struct PairLayer {
  const half_bits* pairs;  // (images, pixels, 2, channels): high parts, then low parts
  const int* exponents;    // (channels): pairs are scaled by 2^exponent
  int channels, shape[3];
  Taps taps;
};

#ifndef CUDA_ON_CPU
__device__ __forceinline__ void copy_16_async(Place to, const void* from, bool there) {
  int bytes = there ? 16 : 0;  // the rest is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int PENDING> __device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Four transposed matrices of 8 x 8; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_turned(unsigned* found, Place row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
               : "r"(row));
}
#endif

// What a tile sees: pixels of its tap from output zero, and the offset of that pixel and its channel.
struct Seat {
  int pixels[3], offset;
};
// The same for all threads, which read it from shared memory to save registers.
struct Shared {
  Seat seats[SEATS];
  int outputs[3], shape[3], strides[3], step[3], images, end, channels;
  const half_bits* pairs;
};
static_assert(sizeof(Shared) == 16 * SEATS + 72, "kernels/pairs.py has this size");
#define SHARED_BYTES (STAGES * STAGE * 2 + (int)sizeof(Shared))

// The byte of a piece (16 bytes) of a row of 64 features: the pieces that eight rows of a matrix have are
// in different banks. Rows begin at multiples of 128 bytes, so that bits of a piece can be flipped.
__device__ __forceinline__ int swizzled(int row, int piece) {
  return row * 128 + (piece ^ row & 7) * 16;
}

#if defined(CUDA_ON_CPU) || __CUDA_ARCH__ >= 800

// Grid (jobs), with SHARED_BYTES of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
pair_products(const PairLayer* __restrict__ layers, const Job* __restrict__ jobs,
              const Grid* __restrict__ grids, float* __restrict__ parts) {
  extern __shared__ __align__(128) int4 room[];
  Shared& all = *(Shared*)(room + STAGES * STAGE / 8);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const Job* job = jobs + blockIdx.x;
  const PairLayer* layer = layers + job->layer;
  const int channels = layer->channels;
  // The position of a thread, and the digits of DEPTH positions.
  const int slot = thread / 8, piece = thread % 8;
  int p = job->begin + slot, at[3], image;
  {
    const Grid* grid = grids + job->grid;
    if (thread < SEATS) {
      const int feature = job->tiles[thread] * TILE;
      int first[3], pixel = 0;
      first_pixels(feature / channels, layer->taps, *grid, first);
      #pragma unroll
      for (int axis = 0; axis < 3; ++axis) {
        all.seats[thread].pixels[axis] = first[axis];
        pixel = pixel * layer->shape[axis] + first[axis];
      }
      all.seats[thread].offset = pixel * 2 * channels + feature % channels;
    }
    int rest = p, count = DEPTH;
    #pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      const int side = grid->outputs[axis];
      at[axis] = rest % side;
      rest /= side;
      if (thread == 0) {
        all.outputs[axis] = side;
        all.shape[axis] = layer->shape[axis];
        all.strides[axis] = layer->taps.strides[axis];
        all.step[axis] = count % side;
      }
      count /= side;
    }
    image = rest;
    if (thread == 0) {
      all.images = count;
      all.end = job->end;
      all.channels = channels;
      all.pairs = layer->pairs;
    }
  }
  int count = (job->end - job->begin + DEPTH - 1) / DEPTH;
  __syncthreads();

  const Place to = place_of(room) + swizzled(slot, piece);
  auto load = [&](int stage) {
    const int a = at[0] * all.strides[0], b = at[1] * all.strides[1], c = at[2] * all.strides[2];
    const int pixel = ((image * all.shape[0] + a) * all.shape[1] + b) * all.shape[2] + c;
    const int low = all.channels, place = pixel * 2 * low + piece * 8;
    const bool counts = p < all.end;
    #pragma unroll
    for (int s = 0; s < SEATS; ++s) {
      const Seat seat = all.seats[s];
      // No branches: all conditions are computed. Nothing is read outside.
      const bool inside = counts & ((unsigned)(a + seat.pixels[0]) < (unsigned)all.shape[0]) &
                          ((unsigned)(b + seat.pixels[1]) < (unsigned)all.shape[1]) &
                          ((unsigned)(c + seat.pixels[2]) < (unsigned)all.shape[2]);
      const half_bits* from = all.pairs + (unsigned)(place + seat.offset);
      copy_16_async(to + stage + s * SEAT * 2, from, inside);
      if (PARTS == 2) copy_16_async(to + stage + s * SEAT * 2 + SLOT * 2, from + low, inside);
    }
    p += DEPTH;
    int carry = 0;
    #pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      at[axis] += all.step[axis] + carry;
      const int over = at[axis] - all.outputs[axis];
      carry = over >= 0;
      at[axis] = carry ? over : at[axis];
    }
    image += all.images + carry;
  };

  #pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < count) load(s * STAGE * 2);
    commit_copies();
  }
  // The rows of matrices that a lane gives the addresses of: of A, matrices 0 and 1 have the same
  // positions; of B, matrices 0 and 2. The rows and columns of a warp are in one tile.
  const int m0 = warp % WARP_ROWS * BLOCKS_M * 16, n0 = warp / WARP_ROWS * BLOCKS_N * 8;
  const Place from_a = place_of(room) + m0 / TILE * SEAT * 2 +
                       swizzled(lane / 16 * 8 + lane % 8, m0 % TILE / 8 + lane / 8 % 2);
  const Place from_b = place_of(room) + (ROWS + n0 / TILE) * SEAT * 2 +
                       swizzled(lane / 8 % 2 * 8 + lane % 8, n0 % TILE / 8 + lane / 16);
  float sums[BLOCKS_M][BLOCKS_N][4] = {};
  int now = 0;
  for (; count > 0; --count) {
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // the copies of all threads are there, and the stage before has been read
    if (count >= STAGES) load(now == 0 ? (STAGES - 1) * STAGE * 2 : now - STAGE * 2);
    commit_copies();
    #pragma unroll 1  // unrolled, registers spill
    for (int k = 0; k < DEPTH; k += 16) {
      unsigned high_b[BLOCKS_N][2], low_b[BLOCKS_N][2];
      #pragma unroll
      for (int j = 0; j < BLOCKS_N; j += 2) {
        const Place from = (from_b + now ^ j * 16) + k * 128;
        load_turned(high_b[j], from);
        if (PARTS == 2) load_turned(low_b[j], from + SLOT * 2);
      }
      #pragma unroll
      for (int i = 0; i < BLOCKS_M; ++i) {
        unsigned high_a[4], low_a[4];
        const Place from = (from_a + now ^ i * 32) + k * 128;
        load_turned(high_a, from);
        if (PARTS == 2) load_turned(low_a, from + SLOT * 2);
        #pragma unroll
        for (int j = 0; j < BLOCKS_N; ++j) add_product(sums[i][j], high_a, low_a, high_b[j], low_b[j]);
      }
    }
    now = now == (STAGES - 1) * STAGE * 2 ? 0 : now + STAGE * 2;
  }
  const int number = job->parts[m0 / TILE * COLUMNS + n0 / TILE];
  if (number < 0) return;
  const int* rows = layer->exponents + job->tiles[m0 / TILE] * TILE % channels;
  const int* columns = layer->exponents + job->tiles[ROWS + n0 / TILE] * TILE % channels;
  float* part = parts + (long long)number * TILE * TILE;
  write_products(part, sums, m0 % TILE, n0 % TILE, rows, columns);
}
#endif
