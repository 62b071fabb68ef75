// Copies of the patches of images: (images, positions, taps * channels), tap-major.
//
// One entry for each thread, features fastest: writes run along rows. Grid-stride loop, any number of
// blocks of 256. Pixels outside the image are zero. The result has the type of the images.

extern "C" __global__ void __launch_bounds__(256)
patches(const scalar* __restrict__ x, scalar* __restrict__ found, Images g, Taps t, Grid grid) {
  const int taps = t.kernel[0] * t.kernel[1] * t.kernel[2], features = taps * g.channels;
  const long long positions = (long long)grid.outputs[0] * grid.outputs[1] * grid.outputs[2];
  const long long numbers = g.images * positions * features;
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < numbers; i += step) {
    const int f = (int)(i % features);
    const long long p = i / features;
    int pixels[3], rest = (int)(p % positions);
    first_pixels(f / g.channels, t, grid, pixels);
    long long place = f % g.channels * g.channel_stride + p / positions * g.image_stride;
    bool inside = true;
    for (int axis = 2; axis >= 0; --axis) {
      const int pixel = rest % grid.outputs[axis] * t.strides[axis] + pixels[axis];
      inside = inside && (unsigned)pixel < (unsigned)g.shape[axis];
      place += pixel * g.pixel_strides[axis];
      rest /= grid.outputs[axis];
    }
    found[i] = inside ? x[place] : (scalar)0;
  }
}
