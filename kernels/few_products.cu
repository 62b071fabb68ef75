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

// Adds the offset of the pixels, which is then not computed again for each pair of feature and position.
__device__ __forceinline__ void add_pixels(long long& offset, const int* pixels, const Images& g) {
  #pragma unroll
  for (int axis = 0; axis < 3; ++axis) offset += pixels[axis] * g.pixel_strides[axis];
}

// The row of one group at a position. The offsets of both have those of their pixels.
__device__ __forceinline__ void read_row(const scalar* __restrict__ own,
                                         const volatile Feature* seen_by, const Position& here,
                                         const Images& g, int features, float* z) {
  #pragma unroll
  for (int f = 0; f < ROWS; ++f) {
    bool inside = here.counts;
    #pragma unroll
    for (int axis = 0; axis < 3; ++axis)
      inside &= (unsigned)(here.pixels[axis] + seen_by[f].pixels[axis]) < (unsigned)g.shape[axis];
    z[f] = inside ? read(own + (seen_by[f].offset + here.offset)) : 0.0f;
    if (f == features) z[f] = 1.0f;
  }
}

// The features of a row, the same for all threads. In shared memory, and volatile where they are read,
// they take no registers.
__device__ __forceinline__ void aim(Feature* seen_by, const Images& g, const Taps& t, const Grid& grid) {
  if (threadIdx.x < ROWS) {
    Feature feature = feature_at(threadIdx.x, g, t, grid);
    add_pixels(feature.offset, feature.pixels, g);
    seen_by[threadIdx.x] = feature;
  }
  __syncthreads();
}

// Output positions from `first` in equal steps, without a division for each.
struct Walk {
  long long image;
  int at[3], step[3], images;

  __device__ __forceinline__ void begin(int first, int count, const Grid& grid) {
    #pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      at[axis] = first % grid.outputs[axis];
      step[axis] = count % grid.outputs[axis];
      first /= grid.outputs[axis];
      count /= grid.outputs[axis];
    }
    image = first;
    images = count;
  }
  __device__ __forceinline__ void advance(const Grid& grid) {
    int carry = 0;
    #pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      at[axis] += step[axis] + carry;
      const int over = at[axis] - grid.outputs[axis];
      carry = over >= 0;
      at[axis] = carry ? over : at[axis];
    }
    image += images + carry;
  }
  // Offsets as for read_row.
  __device__ __forceinline__ Position position(const Images& g, const Taps& t) const {
    Position found;
    found.counts = true;
    found.offset = image * g.image_stride;
    #pragma unroll
    for (int axis = 0; axis < 3; ++axis) found.pixels[axis] = at[axis] * t.strides[axis];
    add_pixels(found.offset, found.pixels, g);
    return found;
  }
};

// Gram matrices: columns are rows, and only lower triangles are written. A piece is a run of positions,
// counted image by image.
extern "C" __global__ void __launch_bounds__(256, 2)
few_products(const scalar* __restrict__ x, const scalar* __restrict__, float* __restrict__ parts,
             Images g, Images, Taps t, Taps, Grid grid, Work work) {
  __shared__ float warps[8][PAIRS];
  const int group = blockIdx.x, features = work.rows - work.ones;
  const scalar* own = x + (long long)group * g.channels * g.channel_stride;
  const long long begin = blockIdx.y * work.length;
  const long long end = begin + work.length < work.units ? begin + work.length : work.units;
  __shared__ Feature seen_by[ROWS];
  aim(seen_by, g, t, grid);
  float sums[PAIRS] = {};
  Walk walk;
  walk.begin((int)begin + threadIdx.x, 256, grid);
  for (long long p = begin + threadIdx.x; p < end; p += 256) {
    float z[ROWS];
    read_row(own, seen_by, walk.position(g, t), g, features, z);
    walk.advance(grid);
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
extern "C" __global__ void __launch_bounds__(256, 2)
few_squares(const scalar* __restrict__ x, const scalar* __restrict__ y, float* __restrict__ parts,
            Images g, Images h, Taps t, Taps plain, Grid grid, Work work) {
  __shared__ float warps[8][ROWS];
  const int group = blockIdx.x, features = work.rows - work.ones, lane = threadIdx.x % 32;
  const int positions = grid.outputs[0] * grid.outputs[1] * grid.outputs[2];
  const long long begin = blockIdx.y * work.length;
  const long long end = begin + work.length < work.units ? begin + work.length : work.units;
  __shared__ Feature seen_by[ROWS];
  aim(seen_by, g, t, grid);
  float totals[ROWS] = {};
  for (long long image = begin + threadIdx.x / 32; image < end; image += 8) {
    const scalar* own = x + image * g.image_stride + (long long)group * g.channels * g.channel_stride;
    const scalar* gradient = y + image * h.image_stride + group * h.channel_stride;
    float sums[ROWS] = {};
    Walk walk;
    walk.begin(lane, 32, grid);
    for (int p = lane; p < positions; p += 32) {
      float z[ROWS];
      read_row(own, seen_by, walk.position(g, t), g, features, z);
      const float found = read(gradient + walk.position(h, plain).offset);
      walk.advance(grid);
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
