// Check of many arrays for NaN and infinity, in one launch.
//
//   spans   for each array its address and its number of entries; all arrays have the type INPUT
//   flags   for each array a one, which becomes zero if an entry is not finite
//
// Grid (blocks, arrays), blocks of 256, grid-stride loops. Every thread writes the
// same zero, so the order does not matter.

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
