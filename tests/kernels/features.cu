// What a kernel may use, each compared with NumPy.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

extern "C" __global__ void indices(int* out) {
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  out[block * threads + thread] = 1000000 * block + 10000 * threadIdx.x + 100 * threadIdx.y +
                                  threadIdx.z;
}

// One block of 64 threads; rows of `out` are the four kinds.
extern "C" __global__ void shuffles(ELEMENT* out, const ELEMENT* in, int width) {
  const int t = threadIdx.x;
  const ELEMENT value = in[t];
  out[t] = __shfl_sync(0xffffffff, value, t + 3, width);
  out[64 + t] = __shfl_up_sync(0xffffffff, value, 2, width);
  out[128 + t] = __shfl_down_sync(0xffffffff, value, 2, width);
  out[192 + t] = __shfl_xor_sync(0xffffffff, value, 5, width);
}

// Half of each warp at a time; a row of `out` for each.
extern "C" __global__ void votes(unsigned int* out, const int* in) {
  const int t = threadIdx.x, n = blockDim.x;
  const unsigned int mask = t % 32 < 16 ? 0x0000ffff : 0xffff0000;
  out[t] = __ballot_sync(mask, in[t] > 0);
  out[n + t] = __any_sync(mask, in[t] > 5);
  out[2 * n + t] = __all_sync(mask, in[t] > -5);
  out[3 * n + t] = __reduce_add_sync(mask, in[t]);
  out[4 * n + t] = __reduce_min_sync(mask, in[t]);
  out[5 * n + t] = __reduce_max_sync(mask, (unsigned int)in[t]);
  out[6 * n + t] = __match_any_sync(mask, in[t]);
  int same;
  out[7 * n + t] = __match_all_sync(mask, in[t], &same);
  out[8 * n + t] = same;
  out[12 * n + t] = __activemask();
  out[9 * n + t] = __syncthreads_count(in[t] > 0);
  out[10 * n + t] = __syncthreads_and(in[t] > -5);
  out[11 * n + t] = __syncthreads_or(in[t] > 5);
}

extern "C" __global__ void atomics(int* i, unsigned long long* u, float* f, double* d, __half* h,
                                   __nv_bfloat16* b) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(&i[0], t);
  atomicSub(&i[1], 1);
  atomicMin(&i[2], t);
  atomicMax(&i[3], t);
  atomicAnd(&i[4], ~(1 << t % 32));
  atomicOr(&i[5], 1 << t % 32);
  atomicXor(&i[6], t);
  atomicInc((unsigned int*)&i[7], 6);
  for (int old = i[8]; old < t;) {  // the largest, by compare and swap
    const int seen = atomicCAS(&i[8], old, t);
    if (seen == old) break;
    old = seen;
  }
  if (t == 3) atomicExch(&i[9], 42);
  atomicAdd(&u[0], 1ull << 33);
  atomicMax(&u[1], (unsigned long long)t << 40);
  atomicAdd(&f[0], 0.5f);
  atomicAdd(&d[0], 0.25);
  if (t < 32) {
    atomicAdd(&h[0], __half(1.0f));
    atomicAdd(&b[0], __nv_bfloat16(1.0f));
  }
}

// Sums a row of `columns` to its end and back: static, dynamic and vector shared memory.
template <typename T> __device__ T block_sum(T value) {
  __shared__ T warps[32];
  for (int offset = 16; offset; offset >>= 1) value += __shfl_down_sync(0xffffffff, value, offset);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  T total = 0;
  for (int i = 0; i < blockDim.x / 32; ++i) total += warps[i];
  __syncthreads();
  return total;
}

extern "C" __global__ void __launch_bounds__(256) row_sums(float* __restrict__ sums,
                                                           const float* __restrict__ rows,
                                                           int columns) {
  extern __shared__ __align__(16) float row[];
  __shared__ float4 first;
  __shared__ __nv_bfloat162 pair;
  for (int i = threadIdx.x; i < columns; i += blockDim.x) row[i] = rows[blockIdx.x * columns + i];
  __syncthreads();
  if (threadIdx.x == 0) {
    first = *reinterpret_cast<const float4*>(row);
    pair = __floats2bfloat162_rn(1.0f, 2.0f);
  }
  __syncthreads();
  float mine = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x; i < columns; i += blockDim.x) mine += row[columns - 1 - i];
  const float total = block_sum(mine);
  const double twice = block_sum(2.0 * mine);
  if (threadIdx.x == 0) {
    sums[4 * blockIdx.x] = total;
    sums[4 * blockIdx.x + 1] = float(twice);
    sums[4 * blockIdx.x + 2] = first.x + first.y + first.z + first.w;
    sums[4 * blockIdx.x + 3] = __low2float(pair) + __high2float(pair);
  }
}

__constant__ float table[4] = {1.0f, 10.0f, 100.0f, 1000.0f};
__device__ const int primes[3] = {2, 3, 5};

struct Scale {
  float factor;
  int shift;
  double bias;
};

// Passing conventions: a struct by value, a null pointer, constants, cache hints.
extern "C" __global__ void passing(double* out, const float4* in, const float* absent,
                                   const __grid_constant__ Scale scale, bool flag, long long big) {
  const float4 v = __ldg(in);
  out[0] = v.x * table[0] + v.y * table[1] + v.z * table[2] + v.w * table[3];
  out[1] = scale.factor * (1 << scale.shift) + scale.bias;
  out[2] = absent == nullptr;
  out[3] = flag ? primes[2] : primes[0];
  __stcs(&out[4], __ldcg(&out[4]) + big);
  out[5] = min(3, 4u) + max(2.5f, __saturatef(7.0f));
  __nv_bfloat16 copied[4];
  memcpy(copied, in, sizeof copied);
  out[6] = float(copied[1]);
}

extern "C" __global__ void float_intrinsics(float* out, const float* in, int n) {
  const int i = threadIdx.x;
  const float x = in[i];
  float* row = out + i;
  row[0 * n] = __expf(x);
  row[1 * n] = exp2f(x);
  row[2 * n] = __logf(fabsf(x));
  row[3 * n] = __log2f(fabsf(x));
  row[4 * n] = rsqrtf(fabsf(x));
  row[5 * n] = __frcp_rn(x);
  row[6 * n] = __fdividef(1.0f, x);
  row[7 * n] = __fmaf_rn(x, x, -1.0f);
  row[8 * n] = __fadd_rn(__fmul_rn(x, x), -1.0f);
  row[9 * n] = __saturatef(x);
  row[10 * n] = __uint_as_float(__float_as_uint(x) & 0x7fffffff);
  row[11 * n] = tanhf(x) + erff(x);
  row[12 * n] = isnan(x) + 2 * isinf(x);
  row[13 * n] = __float2bfloat16(x);
  row[14 * n] = __half(x);
  row[15 * n] = float(__nv_fp8_e4m3(x));
  row[16 * n] = __bfloat162float(__hfma(__nv_bfloat16(x), __nv_bfloat16(x), __nv_bfloat16(1.0f)));
  row[17 * n] = __high2float(__hfma2(__float2half2_rn(x), __float2half2_rn(2.0f),
                                     __float2half2_rn(1.0f)));
  row[18 * n] = hexp(__nv_bfloat16(0.25f * x));
}

extern "C" __global__ void integer_intrinsics(int* out, const int* in, const float* reals, int n) {
  const int i = threadIdx.x;
  const int x = in[i];
  int* row = out + i;
  row[0 * n] = __popc(x);
  row[1 * n] = __clz(x);
  row[2 * n] = __ffs(x);
  row[3 * n] = __brev(x);
  row[4 * n] = __byte_perm(x, 0x89abcdef, 0x7206);
  row[5 * n] = __umulhi(x, 0x12345678);
  row[6 * n] = __mulhi(x, -77777777);
  row[7 * n] = __mul24(x & 0x7fffff, 3);
  row[8 * n] = __float2int_rn(reals[i]);
  row[9 * n] = __float2int_rz(reals[i]);
  row[10 * n] = __float2uint_ru(reals[i]);
  row[11 * n] = __funnelshift_l(x, 0x89abcdef, 12);
  row[12 * n] = __dp4a(x, 0x01020304, 5);
}

// Each thread waits for another of its block: the first of them for the last.
extern "C" __global__ void relay(int* turn) {
  const int mine = blockDim.x - 1 - threadIdx.x;
  while (*(volatile int*)turn != mine) __nanosleep(20);
  *(volatile int*)turn = mine + 1;
}
