#include "mma.cuh"

// One warp multiplies the fragments that each lane is given.
extern "C" __global__ void product(float* d, const unsigned int* a, const unsigned int* b,
                                   const float* c) {
  const int lane = threadIdx.x;
  unsigned int left[4], right[2];
  float sum[4];
  for (int i = 0; i < 4; ++i) left[i] = a[4 * lane + i];
  for (int i = 0; i < 2; ++i) right[i] = b[2 * lane + i];
  for (int i = 0; i < 4; ++i) sum[i] = c[4 * lane + i];
#if TF32
  mma_m16n8k8_tf32(sum, left, right, sum);
#else
  mma_m16n8k16<ELEMENT>(sum, left, right, sum);
#endif
  for (int i = 0; i < 4; ++i) d[4 * lane + i] = sum[i];
}

// Rows of a padded tile of MATRICES x 8 rows in shared memory, as ldmatrix gives them to the lanes.
extern "C" __global__ void load(unsigned int* registers, const unsigned short* tile) {
  constexpr int pitch = 24;
  __shared__ __align__(16) unsigned short rows[8 * MATRICES * pitch];
  const int lane = threadIdx.x;
  for (int i = lane; i < 8 * MATRICES * 8; i += 32) rows[i / 8 * pitch + i % 8] = tile[i];
  __syncwarp();
  unsigned int r[MATRICES];
  const unsigned short* row = &rows[lane % (8 * MATRICES) * pitch];
#if TRANSPOSED
  ldmatrix_trans(r, row);
#else
  ldmatrix(r, row);
#endif
  for (int i = 0; i < MATRICES; ++i) registers[MATRICES * lane + i] = r[i];
}

// Two stages of copies in flight; thread t handles piece t of BYTES of each step.
extern "C" __global__ void pipeline(unsigned char* out, const unsigned char* in, int steps,
                                    int last_bytes) {
  extern __shared__ __align__(16) unsigned char stages[];
  const int at = threadIdx.x * BYTES, step_bytes = blockDim.x * BYTES;
  for (int step = 0; step < steps + 2; ++step) {
    if (step < steps) {
      cp_async<BYTES>(stages + step % 3 * step_bytes + at, in + step * step_bytes + at,
                      step == steps - 1 ? last_bytes : BYTES);
    }
    cp_async_commit();
    if (step < 2) continue;
#if !MISSING_WAIT
    cp_async_wait<2>();
#endif
    for (int i = 0; i < BYTES; ++i) {
      out[(step - 2) * step_bytes + at + i] = stages[(step - 2) % 3 * step_bytes + at + i];
    }
  }
}

// Each thread reads what another has copied.
extern "C" __global__ void exchange(unsigned int* out, const unsigned int* in) {
  extern __shared__ unsigned int words[];
  cp_async<4>(words + threadIdx.x, in + threadIdx.x);
  cp_async_wait_all();
#if !MISSING_BARRIER
  __syncthreads();
#endif
  out[threadIdx.x] = words[threadIdx.x ^ 1];
}
