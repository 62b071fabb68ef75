// Sums over patches without copies of patches: of the pixels of each tap, or of their squares.
//
// Images are summed first: the pixels of a tap do not depend on the image. No atomics: one thread or
// one block computes each sum, in a fixed order.
//
//   totals  (pieces, channels, pixels): sums over the images of a piece
//   SQUARED 1: sums of squares
//   ACROSS  1 if channels are closer in memory than pixels; adjacent threads of a warp read adjacent
//           memory
#ifndef SQUARED
#define SQUARED 0
#endif
#ifndef ACROSS
#define ACROSS 0
#endif

// totals <- sum over the images of each piece. Grid (ceil(channels * pixels / 256), pieces), block
// 256: a thread sums one pixel of one channel.
extern "C" __global__ void __launch_bounds__(256)
sum_images(const scalar* __restrict__ x, float* __restrict__ totals, Images g, int length) {
  const int pixels = g.shape[0] * g.shape[1] * g.shape[2];
  const long long numbers = (long long)pixels * g.channels;
  const long long index = blockIdx.x * 256LL + threadIdx.x;
  if (index >= numbers) return;
#if ACROSS
  const int channel = (int)(index % g.channels), pixel = (int)(index / g.channels);
#else
  const int channel = (int)(index / pixels), pixel = (int)(index % pixels);
#endif
  long long place = channel * g.channel_stride;
  int rest = pixel;
  for (int axis = 2; axis >= 0; --axis) {
    place += rest % g.shape[axis] * g.pixel_strides[axis];
    rest /= g.shape[axis];
  }
  const int begin = blockIdx.y * length, end = min(begin + length, g.images);
  float sum = 0.0f, lost = 0.0f;  // Kahan summation, for thousands of images
  for (int image = begin; image < end; ++image) {
    const float found = read(x + place + image * g.image_stride);
    const float next = (SQUARED ? found * found : found) - lost, larger = sum + next;
    lost = (larger - sum) - next;
    sum = larger;
  }
  totals[blockIdx.y * numbers + (long long)channel * pixels + pixel] = sum;
}

// Returns the sum of feature f = tap * channels + channel over all outputs and pieces, in the first of
// the 256 threads of a block.
__device__ __forceinline__ float tap_sum(int f, const float* __restrict__ totals, int pieces,
                                         const Images& g, const Taps& t, const Grid& grid,
                                         float* warps) {
  const int pixels = g.shape[0] * g.shape[1] * g.shape[2];
  const int outputs = grid.outputs[0] * grid.outputs[1] * grid.outputs[2];
  const float* own = totals + (long long)(f % g.channels) * pixels;
  int first[3];
  first_pixels(f / g.channels, t, grid, first);
  float sum = 0.0f;
  for (long long i = threadIdx.x; i < (long long)outputs * pieces; i += 256) {
    long long place = i / outputs * g.channels * pixels;
    int rest = (int)(i % outputs), step = 1;
    bool inside = true;
    for (int axis = 2; axis >= 0; --axis) {
      const int pixel = rest % grid.outputs[axis] * t.strides[axis] + first[axis];
      inside = inside && (unsigned)pixel < (unsigned)g.shape[axis];
      place += pixel * step;
      step *= g.shape[axis];
      rest /= grid.outputs[axis];
    }
    if (inside) sum += own[place];
  }
  return block_sum(sum, warps);
}

// Last row and column of out (side, side) <- beta out + alpha (sum of patches, count). Block f of
// 256 threads computes feature f; the last block computes the corner.
extern "C" __global__ void __launch_bounds__(256)
border_moment(float* __restrict__ out, const float* __restrict__ totals, int pieces, Images g,
              Taps t, Grid grid, float count, float alpha, float beta) {
  __shared__ float warps[8];
  const int features = gridDim.x - 1, f = blockIdx.x;
  const float sum = f < features ? tap_sum(f, totals, pieces, g, t, grid, warps) : count;
  if (threadIdx.x) return;
  const long long side = features + 1, below = features * side + f;
  const float value = alpha * sum + (beta == 0.0f ? 0.0f : beta * out[below]);
  out[below] = value;
  out[f * side + features] = value;
}

// out (features) <- beta out + alpha (sum of patches). Block f of 256 threads computes f.
extern "C" __global__ void __launch_bounds__(256)
add_patches(float* __restrict__ out, const float* __restrict__ totals, int pieces, Images g, Taps t,
            Grid grid, float alpha, float beta) {
  __shared__ float warps[8];
  const float sum = tap_sum(blockIdx.x, totals, pieces, g, t, grid, warps);
  if (threadIdx.x) return;
  out[blockIdx.x] = alpha * sum + (beta == 0.0f ? 0.0f : beta * out[blockIdx.x]);
}
