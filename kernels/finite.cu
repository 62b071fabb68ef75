// Checks of many arrays for NaN and infinity, and their sums of squares, in one launch.
//
//   spans   for each array its address and its number of entries; all arrays have the type INPUT
//   flags   for each array a one, which becomes zero if an entry is not finite
//   parts   for each array and each block the sum of the squares that the block has read
//
// Grid (blocks, arrays), blocks of 256, grid-stride loops. Every thread writes the same zero to a
// flag, so the order does not matter. The order of a sum is fixed.

struct Span {
  long long address, numbers;
};

extern "C" __global__ void __launch_bounds__(256)
find_infinite(const Span* __restrict__ spans, int* __restrict__ flags) {
  const Span span = spans[blockIdx.y];
  const scalar* own = (const scalar*)span.address;
  const long long step = (long long)gridDim.x * blockDim.x;
  bool bad = false;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < span.numbers; i += step)
    // x * 0 is zero for every x except infinity and NaN.
    bad = bad || !(own[i] * (scalar)0 == (scalar)0);
  if (bad) flags[blockIdx.y] = 0;
}

extern "C" __global__ void __launch_bounds__(256)
sum_squares(const Span* __restrict__ spans, double* __restrict__ parts) {
  __shared__ double sums[256];
  const Span span = spans[blockIdx.y];
  const scalar* own = (const scalar*)span.address;
  const long long step = (long long)gridDim.x * blockDim.x;
  double sum = 0.0;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < span.numbers; i += step)
    sum += (double)own[i] * (double)own[i];
  sums[threadIdx.x] = sum;
  for (int half = 128; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) parts[blockIdx.y * (long long)gridDim.x + blockIdx.x] = sums[0];
}
