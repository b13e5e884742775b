// More values alive at once than the registers that its launch bounds leave.
extern "C" __global__ void __launch_bounds__(1024, 2) spill(const float* x, float* out, int n) {
  float values[48];
#pragma unroll
  for (int i = 0; i < 48; ++i) values[i] = x[threadIdx.x + i * n];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 48; ++i) out[threadIdx.x + i * n] = values[i] * values[47 - i];
}
