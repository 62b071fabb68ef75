// Whether all numbers of each of many arrays are finite, in one launch.
//
//   spans   one an array: where it lies and how many numbers it holds; all of one type, by INPUT
//   flags   one an array, set to one before
//
// Grid (blocks, arrays), blocks of 256, grid-stride loops. Whoever finds a number that is not finite
// writes a zero: in any order it is the same.

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
    // Any number times zero is zero, but for infinity and NaN.
    bad = bad || !(own[i] * (scalar)0 == (scalar)0);
  if (bad) flags[blockIdx.y] = 0;
}
