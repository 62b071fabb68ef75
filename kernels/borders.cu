// Row and column of the homogeneous coordinate of a patch moment: sums of patches.
//
// Summing images first makes the rest small: what a tap sees does not depend on the image.
// No atomics: each number is summed by one thread or one block, in a fixed order.

// totals (channels, pixels) <- sum over images. Grid (ceil(pixels / 256), channels), block 256.
extern "C" __global__ void __launch_bounds__(256)
sum_images(const scalar* __restrict__ x, float* __restrict__ totals, Images g) {
  const int pixels = g.sides[0] * g.sides[1] * g.sides[2];
  const int pixel = blockIdx.x * 256 + threadIdx.x;
  if (pixel >= pixels) return;
  long long place = blockIdx.y * g.channel_stride;
  int rest = pixel;
  for (int axis = 2; axis >= 0; --axis) {
    place += rest % g.sides[axis] * g.pixel_strides[axis];
    rest /= g.sides[axis];
  }
  float sum = 0.0f, lost = 0.0f;  // Kahan: thousands of images lose no digits
  for (int image = 0; image < g.images; ++image) {
    const float next = read(x + place + image * g.image_stride) - lost, larger = sum + next;
    lost = (larger - sum) - next;
    sum = larger;
  }
  totals[(long long)blockIdx.y * pixels + pixel] = sum;
}

// Last row and column of out (side, side) <- beta out + alpha (sum of patches, count). Block f of
// 256 threads does feature f = tap * channels + channel; the last block the corner.
extern "C" __global__ void __launch_bounds__(256)
border_moment(float* __restrict__ out, const float* __restrict__ totals, Images g, Taps t,
              Grid grid, float count, float alpha, float beta) {
  __shared__ float warps[8];
  const int features = gridDim.x - 1, f = blockIdx.x;
  float sum = 0.0f;
  if (f < features) {
    int first[3];
    first_pixels(f / g.channels, t, grid, first);
    const float* own = totals + (long long)(f % g.channels) * g.sides[0] * g.sides[1] * g.sides[2];
    const int outputs = grid.outputs[0] * grid.outputs[1] * grid.outputs[2];
    for (int o = threadIdx.x; o < outputs; o += 256) {
      int rest = o, place = 0, step = 1;
      bool inside = true;
      for (int axis = 2; axis >= 0; --axis) {
        const int pixel = rest % grid.outputs[axis] * t.strides[axis] + first[axis];
        inside = inside && (unsigned)pixel < (unsigned)g.sides[axis];
        place += pixel * step;
        step *= g.sides[axis];
        rest /= grid.outputs[axis];
      }
      if (inside) sum += own[place];
    }
  }
  sum = block_sum(sum, warps);
  if (threadIdx.x) return;
  if (f == features) sum = count;
  const long long side = features + 1, below = features * side + f;
  const float value = alpha * sum + (beta == 0.0f ? 0.0f : beta * out[below]);
  out[below] = value;
  out[f * side + features] = value;
}
