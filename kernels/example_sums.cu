// Per-example gradients of a scale and a shift: sums of x * ds and of ds over positions.
//
//   x, ds   (n, entries, *shape) of any strides, as images whose channels are the entries; a stride of
//           zero broadcasts
//   sums    (n, 2 entries): all of x * ds, then all of ds
//
// Block (32, 8), grid (ceil(entries / WIDTH), n). No atomics: sums have a fixed order.
//
//   ACROSS 0   positions are closer in memory than entries: a warp sums one entry, WIDTH is 8
//   ACROSS 1   entries are closer in memory: a thread sums every eighth position of one entry, WIDTH
//              is 32
#ifndef ACROSS
#define ACROSS 0
#endif

struct __align__(4 * sizeof(scalar)) FourScalars {
  scalar at[4];
};

// Whether adjacent positions have one distance, `step`: no position needs a division then.
__device__ __forceinline__ bool evenly_spaced(const Images& g, long long& step) {
  const int rows = g.shape[1] * g.shape[2];
  step = g.shape[2] > 1 ? g.pixel_strides[2] : g.shape[1] > 1 ? g.pixel_strides[1] : g.pixel_strides[0];
  return (g.shape[1] == 1 || g.pixel_strides[1] == g.shape[2] * step) &&
         (g.shape[0] == 1 || g.pixel_strides[0] == rows * step);
}

__device__ __forceinline__ long long place_of(int position, const Images& g) {
  long long place = 0;
  #pragma unroll
  for (int axis = 2; axis >= 0; --axis) {
    place += position % g.shape[axis] * g.pixel_strides[axis];
    position /= g.shape[axis];
  }
  return place;
}

extern "C" __global__ void __launch_bounds__(256)
example_sums(const scalar* __restrict__ x, const scalar* __restrict__ ds, float* __restrict__ sums,
             Images g, Images h) {
  const int positions = h.shape[0] * h.shape[1] * h.shape[2], image = blockIdx.y;
#if ACROSS
  __shared__ float products[8][33], plain[8][33];
  const int entry = blockIdx.x * 32 + threadIdx.x, first = threadIdx.y, step = 8;
#else
  const int entry = blockIdx.x * 8 + threadIdx.y, first = threadIdx.x, step = 32;
#endif
  float product = 0.0f, sum = 0.0f;
  if (entry < h.channels) {
    const scalar* own = x + image * g.image_stride + entry * g.channel_stride;
    const scalar* gradient = ds + image * h.image_stride + entry * h.channel_stride;
    long long near, far;
    const bool even = evenly_spaced(g, near) & evenly_spaced(h, far);
    int done = 0;
#if !ACROSS
    // Four positions at a time, if both entries begin at a multiple of their size.
    const bool wide = even && near == 1 && far == 1 &&
                      ((unsigned long long)own | (unsigned long long)gradient) % sizeof(FourScalars) == 0;
    done = wide ? positions / 4 * 4 : 0;
    #pragma unroll 2
    for (int i = first; i < done / 4; i += 32) {
      const FourScalars a = ((const FourScalars*)own)[i], b = ((const FourScalars*)gradient)[i];
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float found = read(b.at + j);
        product += read(a.at + j) * found;
        sum += found;
      }
    }
#endif
    if (even) {
      #pragma unroll 4
      for (int p = done + first; p < positions; p += step) {
        const float found = read(gradient + p * far);
        product += read(own + p * near) * found;
        sum += found;
      }
    } else {
      for (int p = first; p < positions; p += step) {
        const float found = read(gradient + place_of(p, h));
        product += read(own + place_of(p, g)) * found;
        sum += found;
      }
    }
  }
#if ACROSS
  products[threadIdx.y][threadIdx.x] = product;
  plain[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y) return;
  product = sum = 0.0f;
  for (int y = 0; y < 8; ++y) {
    product += products[y][threadIdx.x];
    sum += plain[y][threadIdx.x];
  }
#else
  product = warp_sum(product);
  sum = warp_sum(sum);
  if (threadIdx.x) return;
#endif
  if (entry >= h.channels) return;
  float* own = sums + image * 2LL * h.channels + entry;
  own[0] = product;
  own[h.channels] = sum;
}
