// Kernels that are wrong when `broken` is set and right when it is not: one block of 64 threads,
// `out` and `in` of 64 elements. The lines that a fault names end in `// here`.

extern "C" __global__ void reads_past_the_end(float* out, const float* in, int broken) {
  out[threadIdx.x] = in[threadIdx.x + (broken ? 4 : 0)];  // here
}

extern "C" __global__ void writes_before_the_start(float* out, const float* in, int broken) {
  out[int(threadIdx.x) - (broken ? 2 : 0)] = in[threadIdx.x];  // here
}

// 8 rows of 4 elements, 8 apart.
extern "C" __global__ void writes_between_rows(float* out, const float* in, int broken) {
  const int row = threadIdx.x / 4 % 8, column = threadIdx.x % 4;
  out[8 * row + column + (broken && threadIdx.x > 40 ? 4 : 0)] = 1.0f;  // here
}

extern "C" __global__ void copies_past_the_end(float* out, const float* in, int broken) {
  if (threadIdx.x == 0) memcpy(out, in, broken ? 260 : 256);  // here
}

extern "C" __global__ void misaligned(float* out, const float* in, int broken) {
  if (threadIdx.x >= 15) return;
  const float* from = in + 4 * threadIdx.x + (broken ? 1 : 0);
  reinterpret_cast<uint4*>(out)[threadIdx.x] = *reinterpret_cast<const uint4*>(from);  // here
}

extern "C" __global__ void writes_its_input(float* out, const float* in, int broken) {
  out[threadIdx.x] = in[threadIdx.x];
  if (broken) const_cast<float*>(in)[threadIdx.x] = 0.0f;  // here
}

extern "C" __global__ void missing_barrier(float* out, const float* in, int broken) {
  __shared__ float tile[64];
  tile[threadIdx.x] = in[threadIdx.x];
  if (!broken) __syncthreads();
  out[threadIdx.x] = tile[(threadIdx.x + 63) % 64];  // here
}

extern "C" __global__ void missing_second_barrier(float* out, const float* in, int broken) {
  extern __shared__ float tile[];
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  const float neighbour = tile[(threadIdx.x + 63) % 64];  // here
  if (!broken) __syncthreads();
  tile[threadIdx.x] = neighbour;  // here
  out[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void missing_warp_barrier(float* out, const float* in, int broken) {
  __shared__ float tile[64];
  tile[threadIdx.x] = in[threadIdx.x];
  if (!broken) __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 1];  // here
}

extern "C" __global__ void counts_without_atomics(int* out, const int* in, int broken) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  if (broken) ++count;  // here
  else atomicAdd(&count, 1);
  __syncthreads();
  out[threadIdx.x] = count;
}

extern "C" __global__ void uninitialised(float* out, const float* in, int broken) {
  __shared__ float tile[64];
  if (threadIdx.x > 0 || !broken) tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[63 - threadIdx.x];  // here
}

extern "C" __global__ void past_dynamic_shared(float* out, const float* in, int broken) {
  extern __shared__ float tile[];
  tile[threadIdx.x + (broken ? 1 : 0)] = in[threadIdx.x];  // here
  out[threadIdx.x] = tile[threadIdx.x + (broken ? 1 : 0)];
}

extern "C" __global__ void two_barriers(float* out, const float* in, int broken) {
  if (threadIdx.x < 40 && broken) {
    __syncthreads();  // here
  } else {
    __syncthreads();  // here
  }
  out[threadIdx.x] = in[threadIdx.x];
}

extern "C" __global__ void barrier_after_return(float* out, const float* in, int broken) {
  if (broken && threadIdx.x >= 50) return;
  out[threadIdx.x] = in[threadIdx.x];
  __syncthreads();  // here
}

extern "C" __global__ void reads_a_returned_lane(float* out, const float* in, int broken) {
  if (broken && threadIdx.x == 5) return;
  out[threadIdx.x] = __shfl_xor_sync(0xffffffff, in[threadIdx.x], 1);  // here
}

extern "C" __global__ void reads_outside_the_mask(float* out, const float* in, int broken) {
  if (threadIdx.x % 32 >= 16) return;
  out[threadIdx.x] = __shfl_sync(0xffff, in[threadIdx.x], broken ? 16 : 3);  // here
}

extern "C" __global__ void lane_elsewhere(float* out, const float* in, int broken) {
  float value = in[threadIdx.x];
  if (broken && threadIdx.x % 32 == 7) {
    __syncwarp();  // here
  } else {
    value = __shfl_down_sync(0xffffffff, value, 1);  // here
  }
  out[threadIdx.x] = value;
}

extern "C" __global__ void not_in_its_own_mask(unsigned int* out, const int* in, int broken) {
  out[threadIdx.x] = __ballot_sync(broken ? 0xfffffffe : 0xffffffff, in[threadIdx.x]);  // here
}

extern "C" __global__ void undefined_arithmetic(int* out, const int* in, int broken) {
  int few[4] = {1, 2, 3, 4};
  if (broken == 1) out[0] = in[0] * in[0];  // here
  if (broken == 2) out[0] = 1 << (in[0] + 32);  // here
  if (broken == 3) out[0] = 7 / (in[0] - in[0]);  // here
  if (broken == 4) out[0] = few[in[0] + 4];  // here
  if (broken == 5) __trap();  // here
  if (broken == 6) assert(in[0] > 1000);  // here
  if (broken == 7) out = nullptr;  // here
  out[threadIdx.x] = few[threadIdx.x % 4];
}

// All blocks of a grid write to one place.
extern "C" __global__ void blocks_write_one_place(int* out, const int* in, int broken) {
  if (broken) out[threadIdx.x] = in[threadIdx.x];
  else if (blockIdx.x == 0) out[threadIdx.x] = in[threadIdx.x];
}
