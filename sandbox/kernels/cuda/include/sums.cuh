// Sums over the lanes of a warp and over a block, the same in all their threads.
#pragma once

// Over each group of Lanes neighbours, a power of two.
template <int Lanes = 32> __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = Lanes / 2; step > 0; step >>= 1) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}

// Over a block of Warps whole warps; once a kernel.
template <int Warps> __device__ __forceinline__ float block_sum(float value) {
  __shared__ float sums[Warps];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < Warps; ++warp) total += sums[warp];
  return total;
}
