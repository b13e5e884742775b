// A block reverses its stretch through dynamic shared memory.
extern "C" __global__ void reverse(const int* x, int* out) {
  extern __shared__ int stage[];
  const int first = blockIdx.x * blockDim.x;
  stage[threadIdx.x] = x[first + threadIdx.x];
  __syncthreads();
  out[first + threadIdx.x] = stage[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(96, 1) bounded(float* out) {
  __shared__ float stage[33];
  stage[threadIdx.x % 33] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = stage[32 - threadIdx.x % 33];
}
