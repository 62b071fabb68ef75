// Second moments of groups of few features, as of depthwise filters: a thread keeps all products of a
// row in its registers.
//
//   x       images (n, groups * channels, *sides) of any strides; a row has the features
//           tap * channels + channel of its group and, with `ones`, a one after them
//   parts   (pieces, groups, rows, rows): lower triangles of what each piece of the work finds;
//           add_parts of group_products.cu adds them up
//   ROWS    at least the length of a row
//
// A block of 256 threads does one group and one piece, a run of positions counted image by image: grid
// (groups, pieces). A thread does every 256th position, so that neighbours read neighbouring pixels.
// No atomics: sums of threads are added in a fixed order.
#ifndef ROWS
#define ROWS 10
#endif
#define PAIRS (ROWS * (ROWS + 1) / 2)

extern "C" __global__ void __launch_bounds__(256)
few_products(const scalar* __restrict__ x, float* __restrict__ parts, Images g, Taps t, Grid grid,
             Work work) {
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
    #pragma unroll
    for (int f = 0; f < ROWS; ++f) {
      const long long from = seen(seen_by[f], here, g);
      z[f] = from < 0 ? 0.0f : read(own + from);
      if (f == features) z[f] = 1.0f;
    }
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
