// Products of rows with few features for each group, as of depthwise filters: a thread has all sums of
// a group in its registers.
//
//   x       images (n, groups * channels, *shape) of any strides; a row has the features
//           tap * channels + channel of its group and, with `ones`, a one after them
//   parts   (pieces, groups, rows, columns): partial results of the pieces; add_parts of averages.cu
//           adds them
//   ROWS    bound of the length of a row
//
// A block of 256 threads computes one group of one piece: grid (groups, pieces). Adjacent threads read
// adjacent pixels. No atomics: sums of threads are added in a fixed order.
#ifndef ROWS
#define ROWS 10
#endif
#define PAIRS (ROWS * (ROWS + 1) / 2)

// The row of one group at a position.
__device__ __forceinline__ void read_row(const scalar* __restrict__ own, const Feature* seen_by,
                                         const Position& here, const Images& g, int features,
                                         float* z) {
  #pragma unroll
  for (int f = 0; f < ROWS; ++f) {
    const long long from = seen(seen_by[f], here, g);
    z[f] = from < 0 ? 0.0f : read(own + from);
    if (f == features) z[f] = 1.0f;
  }
}

// Least number of blocks of a multiprocessor. Without it, the compiler uses 128 registers on sm_90 and
// spills; older architectures need about 150 registers and fit one block.
#if __CUDA_ARCH__ >= 860
#define RESIDENT 2
#else
#define RESIDENT 1
#endif

// Gram matrices: columns are rows, and only lower triangles are written. A piece is a run of positions,
// counted image by image.
extern "C" __global__ void __launch_bounds__(256, RESIDENT)
few_products(const scalar* __restrict__ x, const scalar* __restrict__, float* __restrict__ parts,
             Images g, Images, Taps t, Taps, Grid grid, Work work) {
  __shared__ float warps[8][PAIRS];
  const int group = blockIdx.x, features = work.rows - work.ones;
  const scalar* own = x + (long long)group * g.channels * g.channel_stride;
  const long long begin = blockIdx.y * work.length;
  const long long end = begin + work.length < work.units ? begin + work.length : work.units;
  Feature seen_by[ROWS];  // the same for all threads
  #pragma unroll
  for (int f = 0; f < ROWS; ++f) seen_by[f] = feature_at(f, g, t, grid);
  float sums[PAIRS] = {};
  for (long long p = begin + threadIdx.x; p < end; p += 256) {
    const Position here = position_at((int)p, (int)end, g, t, grid);
    float z[ROWS];
    read_row(own, seen_by, here, g, features, z);
    #pragma unroll
    for (int i = 0; i < ROWS; ++i)
      #pragma unroll
      for (int j = 0; j <= i; ++j) sums[i * (i + 1) / 2 + j] += z[i] * z[j];
  }
  #pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    const float sum = warp_sum(sums[pair]);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32][pair] = sum;
  }
  __syncthreads();
  float* part = parts + (blockIdx.y * (long long)work.groups + group) * work.rows * work.rows;
  for (int row = threadIdx.x / 16; row < work.rows; row += 16)
    for (int column = threadIdx.x % 16; column <= row; column += 16) {
      float sum = 0.0f;
      for (int warp = 0; warp < 8; ++warp) sum += warps[warp][row * (row + 1) / 2 + column];
      part[row * work.rows + column] = sum;
    }
}

// Squared gradients of examples, for groups with one output, y (n, groups, *outputs): the sum over
// images of (sum over positions of z y)^2. A piece is a run of images; a warp sums every eighth
// image.
extern "C" __global__ void __launch_bounds__(256)
few_squares(const scalar* __restrict__ x, const scalar* __restrict__ y, float* __restrict__ parts,
            Images g, Images h, Taps t, Taps plain, Grid grid, Work work) {
  __shared__ float warps[8][ROWS];
  const int group = blockIdx.x, features = work.rows - work.ones, lane = threadIdx.x % 32;
  const int positions = grid.outputs[0] * grid.outputs[1] * grid.outputs[2];
  const long long begin = blockIdx.y * work.length;
  const long long end = begin + work.length < work.units ? begin + work.length : work.units;
  const Feature output = feature_at(0, h, plain, Grid{{0, 0, 0}, {1, 1, 1}});
  Feature seen_by[ROWS];
  #pragma unroll
  for (int f = 0; f < ROWS; ++f) seen_by[f] = feature_at(f, g, t, grid);
  float totals[ROWS] = {};
  for (long long image = begin + threadIdx.x / 32; image < end; image += 8) {
    const scalar* own = x + image * g.image_stride + (long long)group * g.channels * g.channel_stride;
    const scalar* gradient = y + image * h.image_stride + group * h.channel_stride;
    float sums[ROWS] = {};
    for (int p = lane; p < positions; p += 32) {
      float z[ROWS];
      read_row(own, seen_by, position_at(p, positions, g, t, grid), g, features, z);
      const float found = read(gradient + seen(output, position_at(p, positions, h, plain, grid), h));
      #pragma unroll
      for (int f = 0; f < ROWS; ++f) sums[f] += z[f] * found;
    }
    #pragma unroll
    for (int f = 0; f < ROWS; ++f) {
      const float sum = warp_sum(sums[f]);  // defined in lane 0, which writes the totals
      totals[f] += sum * sum;
    }
  }
  #pragma unroll
  for (int f = 0; f < ROWS; ++f)
    if (lane == 0) warps[threadIdx.x / 32][f] = totals[f];
  __syncthreads();
  if ((int)threadIdx.x >= work.rows) return;
  float sum = 0.0f;
  for (int warp = 0; warp < 8; ++warp) sum += warps[warp][threadIdx.x];
  parts[(blockIdx.y * (long long)work.groups + group) * work.rows + threadIdx.x] = sum;
}
