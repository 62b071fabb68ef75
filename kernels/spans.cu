// Arithmetic on many arrays in one launch: checks for NaN and infinity, inner products, and sums of two.
//
//   spans, pairs, combinations   for each array its address, its number of entries, and those of the arrays
//                                it is combined with; all arrays are contiguous and have the type INPUT
//   flags   for each array a one, which becomes zero if an entry is not finite
//   parts   for each pair and each block the inner product of the entries that the block has read
//
// Grid (blocks, arrays), blocks of 256, grid-stride loops. Every thread writes the same zero to a
// flag, so the order does not matter. The order of a sum is fixed.

// Entries that a thread reads at a time, where all arrays begin at a multiple of 16 bytes.
#define WIDE (16 / (int)sizeof(scalar))
struct __align__(16) Wide {
  scalar at[WIDE];
};
// Returns the number of wide reads of arrays at these addresses.
__device__ __forceinline__ long long wide_reads(long long addresses, long long numbers) {
  return addresses % 16 ? 0 : numbers / WIDE;
}

struct Span {
  long long address, numbers;
};
struct TwoSpans {
  long long left, right, numbers;
};
struct Combination {
  long long out, x, y, numbers;  // y is 0 where there is none
  double a, b, exponent;         // of the inner product in `row` of the parts
  long long row;                 // -1 for none
};

extern "C" __global__ void __launch_bounds__(256)
find_infinite(const Span* __restrict__ spans, int* __restrict__ flags) {
  const Span span = spans[blockIdx.y];
  const scalar* own = (const scalar*)span.address;
  const long long step = (long long)gridDim.x * blockDim.x;
  const long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  const long long wide = wide_reads(span.address, span.numbers);
  bool bad = false;
  // x * 0 is zero for every x except infinity and NaN.
  #pragma unroll 4
  for (long long i = thread; i < wide; i += step) {
    const Wide x = ((const Wide*)own)[i];
    #pragma unroll
    for (int j = 0; j < WIDE; ++j) bad |= !(x.at[j] * (scalar)0 == (scalar)0);
  }
  for (long long i = wide * WIDE + thread; i < span.numbers; i += step)
    bad |= !(own[i] * (scalar)0 == (scalar)0);
  if (bad) flags[blockIdx.y] = 0;
}

// The sum over a block of 256 threads, in every thread; the order is fixed.
__device__ __forceinline__ double total(double value, double* sums) {
  sums[threadIdx.x] = value;
  for (int half = 128; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  return sums[0];
}

extern "C" __global__ void __launch_bounds__(256)
multiply_pairs(const TwoSpans* __restrict__ pairs, double* __restrict__ parts) {
  __shared__ double sums[256];
  const TwoSpans pair = pairs[blockIdx.y];
  const scalar *left = (const scalar*)pair.left, *right = (const scalar*)pair.right;
  const long long step = (long long)gridDim.x * blockDim.x;
  const long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  const long long wide = wide_reads(pair.left | pair.right, pair.numbers);
  double sum = 0.0;
  #pragma unroll 4
  for (long long i = thread; i < wide; i += step) {
    const Wide x = ((const Wide*)left)[i], y = ((const Wide*)right)[i];
    #pragma unroll
    for (int j = 0; j < WIDE; ++j) sum += (double)x.at[j] * (double)y.at[j];
  }
  for (long long i = wide * WIDE + thread; i < pair.numbers; i += step)
    sum += (double)left[i] * (double)right[i];
  sum = total(sum, sums);
  if (threadIdx.x == 0) parts[blockIdx.y * (long long)gridDim.x + blockIdx.x] = sum;
}

// The sum of a row of parts, in every thread of a block.
__device__ __forceinline__ double product_in(const double* parts, long long row, int columns,
                                             double* sums) {
  double sum = 0.0;
  for (int i = threadIdx.x; i < columns; i += 256) sum += parts[row * columns + i];
  return total(sum, sums);
}

// out <- s^exponent (a x + b y), with the inner product s in a row of the parts; the factor is 1 for
// s = 0. out may be x or y.
extern "C" __global__ void __launch_bounds__(256)
combine_arrays(const Combination* __restrict__ combinations, const double* __restrict__ parts,
               int columns) {
  __shared__ double sums[256];
  const Combination own = combinations[blockIdx.y];
  double factor = 1.0;
  if (own.row >= 0) {
    const double product = product_in(parts, own.row, columns, sums);
    if (product != 0.0) factor = pow(product, own.exponent);
  }
  const scalar a = (scalar)own.a, b = (scalar)own.b;
  scalar* out = (scalar*)own.out;
  const scalar *x = (const scalar*)own.x, *y = (const scalar*)own.y;
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < own.numbers; i += step)
    if (own.row >= 0)  // a factor may be beyond the range of floats
      out[i] = (scalar)(factor * (own.a * (double)x[i] + (y ? own.b * (double)y[i] : 0.0)));
    else
      out[i] = y ? a * x[i] + b * y[i] : a * x[i];
}

// out <- x where the inner product in a row of the parts is positive, else y.
extern "C" __global__ void __launch_bounds__(256)
choose_arrays(const Combination* __restrict__ combinations, const double* __restrict__ parts,
              int columns) {
  __shared__ double sums[256];
  const Combination own = combinations[blockIdx.y];
  const bool first = product_in(parts, own.row, columns, sums) > 0.0;
  scalar* out = (scalar*)own.out;
  const scalar* from = (const scalar*)(first ? own.x : own.y);
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < own.numbers; i += step)
    out[i] = from[i];
}
