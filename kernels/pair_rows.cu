// Products of the pixels of channels from pairs of half-precision numbers, as pair_products.cu for one tap,
// but read from the images: numbers become pairs on their way to shared memory, without a copy of them.
//
//   layers  images of several layers, whose pixels are contiguous; the number of pixels of an image is a
//           multiple of 4 and at least DEPTH, images and channels begin at a multiple of four numbers,
//           and an image has fewer than 2^31 numbers
//   jobs    one for each block
//   parts   (products, 64, 64)
//
// A block multiplies SIDE x SIDE tiles. A thread reads four adjacent pixels of a feature at a time. The
// numbers of the next stage are in registers while a stage is multiplied. Rows and columns of a block on
// the diagonal are the same tiles, which are read once. Features after the last count as zeros. No atomics.
//
//   SIDE  tiles along both sides of a block, 1 or 2
#ifndef SIDE
#define SIDE 2
#endif
#define DEPTH 32                          // positions of a stage
#define WARP_ROWS 2                       // warps along both sides of a block
#define WARP_COLUMNS (2 * SIDE)
#define THREADS (32 * WARP_ROWS * WARP_COLUMNS)
#define SEATS (2 * SIDE)                  // tiles in shared memory
#define STEP (THREADS / 8)                // features between those of a thread
#define READS (SEATS * TILE / STEP)
#define SLOT (TILE * DEPTH * 2)           // bytes of a tile: of its high parts, or its low parts
#define LOW (SEATS * SLOT)                // bytes from high parts to low parts
#define STAGE (PARTS * LOW)
#define BLOCKS_M (SIDE * TILE / WARP_ROWS / 16)  // 16 x 8 products of a warp
#define BLOCKS_N (SIDE * TILE / WARP_COLUMNS / 8)
static_assert(READS * STEP == SEATS * TILE && TILE % STEP == 0, "threads read equal numbers of features");

struct RowLayer {
  const void* x;
  const unsigned* peaks;  // (pieces, channels): bits of the largest magnitudes
  long long image_stride;
  int channel_stride, pixels, channels, pieces;
};
struct Shared {
  float scales[SEATS * TILE];
  int exponents[SEATS * TILE];
};
static_assert(sizeof(Shared) == 8 * SEATS * TILE, "kernels/pairs.py has this size");

struct __align__(4 * sizeof(scalar)) FourScalars {
  scalar at[4];
};

#ifndef CUDA_ON_CPU
// Four matrices of 8 x 8; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_rows(unsigned* found, Place row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
               : "r"(row));
}
__device__ __forceinline__ void store_two(Place to, unsigned a, unsigned b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}
#endif

// The byte of a piece (8 positions, 16 bytes) of a feature: the pieces that eight features of a matrix
// have are in different banks.
__device__ __forceinline__ int swizzled(int feature, int piece) {
  return feature * 64 + (piece ^ feature / 2 & 3) * 16;
}

#if defined(CUDA_ON_CPU) || __CUDA_ARCH__ >= 800

// Grid (jobs), with 2 * STAGE + sizeof(Shared) bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
pair_rows(const RowLayer* __restrict__ layers, const Job* __restrict__ jobs,
          float* __restrict__ parts) {
  extern __shared__ __align__(128) int4 room[];
  Shared& all = *(Shared*)(room + 2 * STAGE / 16);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const Job* job = jobs + blockIdx.x;
  const RowLayer* layer = layers + job->layer;
  const int pixels = layer->pixels, channels = layer->channels, end = job->end;
  const int channel_stride = layer->channel_stride;
  const long long image_stride = layer->image_stride;
  bool same = true;  // rows and columns are the same tiles
  #pragma unroll
  for (int i = 0; i < SIDE; ++i) same &= job->tiles[i] == job->tiles[2 + i];
  for (int f = thread; f < SEATS * TILE; f += THREADS) {
    const int channel = job->tiles[f / TILE / SIDE * 2 + f / TILE % SIDE] * TILE + f % TILE;
    unsigned most = 0;
    for (int piece = 0; channel < channels && piece < layer->pieces; ++piece)
      most = max(most, layer->peaks[piece * channels + channel]);
    all.exponents[f] = exponent_for(most);
    all.scales[f] = power_of_two(exponent_for(most));
  }
  // The pixels of a thread, and its features: every STEP-th one of all tiles.
  const int feature = thread / 8;
  int p = job->begin + thread % 8 * 4, pixel = p % pixels;
  const scalar* image = (const scalar*)layer->x + p / pixels * image_stride;
  int first[SEATS];  // the first feature of a thread in each tile
  #pragma unroll
  for (int s = 0; s < SEATS; ++s) first[s] = job->tiles[s / SIDE * 2 + s % SIDE] * TILE + feature;
  __syncthreads();

  FourScalars found[READS];
  auto read_next = [&]() {
    #pragma unroll
    for (int i = 0; i < READS; ++i) {
      if (same && i >= READS / 2) break;
      const int channel = first[i * STEP / TILE] + i * STEP % TILE;
      found[i] = FourScalars{};
      if (p < end && channel < channels)
        found[i] = *(const FourScalars*)(image + pixel + channel * channel_stride);
    }
    p += DEPTH;
    pixel += DEPTH;
    const bool over = pixel >= pixels;
    pixel -= over ? pixels : 0;
    image += over ? image_stride : 0;
  };
  const Place to = place_of(room) + swizzled(feature, thread % 8 / 2) + thread % 2 * 8;
  auto store = [&](int stage) {
    #pragma unroll
    for (int i = 0; i < READS; ++i) {
      if (same && i >= READS / 2) break;
      const float scale = all.scales[i * STEP + feature];
      float x[4];
      #pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = read(found[i].at + j) * scale;
      const unsigned a = two_halves(x[0], x[1]), b = two_halves(x[2], x[3]);
      const Place at = to + stage + i * STEP * 64;
      store_two(at, a, b);
      if (PARTS == 2) store_two(at + LOW, two_rests(a, x[0], x[1]), two_rests(b, x[2], x[3]));
    }
  };
  read_next();
  store(0);
  // The rows of matrices that a lane gives the addresses of: of A, matrices 0 and 1 have the same
  // positions; of B, matrices 0 and 2. The rows and columns of a warp are in one tile.
  const int m0 = warp % WARP_ROWS * BLOCKS_M * 16, n0 = warp / WARP_ROWS * BLOCKS_N * 8;
  const Place from_a = place_of(room) + swizzled(m0 + lane % 16, lane / 16);
  const Place from_b = place_of(room) + (same ? 0 : SIDE * SLOT) +
                       swizzled(n0 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  float sums[BLOCKS_M][BLOCKS_N][4] = {};
  int now = 0;
  __syncthreads();
  for (int count = (end - job->begin + DEPTH - 1) / DEPTH; count > 0; --count) {
    if (count > 1) read_next();
    #pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
      unsigned high_b[BLOCKS_N][2], low_b[BLOCKS_N][2];
      #pragma unroll
      for (int j = 0; j < BLOCKS_N; j += 2) {
        const Place from = (from_b + now ^ k * 32) + j * 8 * 64;
        load_rows(high_b[j], from);
        if (PARTS == 2) load_rows(low_b[j], from + LOW);
      }
      #pragma unroll
      for (int i = 0; i < BLOCKS_M; ++i) {
        unsigned high_a[4], low_a[4];
        const Place from = (from_a + now ^ k * 32) + i * 16 * 64;
        load_rows(high_a, from);
        if (PARTS == 2) load_rows(low_a, from + LOW);
        #pragma unroll
        for (int j = 0; j < BLOCKS_N; ++j) add_product(sums[i][j], high_a, low_a, high_b[j], low_b[j]);
      }
    }
    now ^= STAGE;
    if (count > 1) store(now);  // all threads have read this stage before the last barrier
    __syncthreads();
  }
  const int number = job->parts[m0 / TILE * SIDE + n0 / TILE];
  if (number < 0) return;
  const int* rows = all.exponents + m0 / TILE * TILE;
  const int* columns = all.exponents + (SIDE + n0 / TILE) * TILE;
  float* part = parts + (long long)number * TILE * TILE;
  write_products(part, sums, m0 % TILE, n0 % TILE, rows, columns);
}
#endif
