// Hopper's bulk copy engine (sm_90 and newer): whole rows between global and shared memory without
// passing through registers. Addresses and sizes are multiples of 16 bytes.
//
// On the host a load is done when it is issued, so waiting is free; a thread may read only what it
// loaded itself, or what lies behind a __syncthreads.
#pragma once

struct BulkBarrier {
  unsigned long long state;
};

#ifndef SANDBOX_HOST

__device__ __forceinline__ unsigned int shared_address(const void* pointer) {
  return (unsigned int)__cvta_generic_to_shared(pointer);
}

// By one thread, before a barrier that all `arrivals` threads pass.
__device__ __forceinline__ void bulk_barrier_init(BulkBarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n\tfence.proxy.async.shared::cta;" ::"r"(
                   shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Arrive, and announce the bytes that this thread is about to load.
__device__ __forceinline__ void bulk_barrier_expect(BulkBarrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_barrier_wait(BulkBarrier* barrier, int parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
      "@!done bra again;\n\t}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes,
                                          BulkBarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// Wait until the shared memory of this thread's stores may be written again or given up.
__device__ __forceinline__ void bulk_store_drain() {
  asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}

#else

inline void bulk_barrier_init(BulkBarrier* barrier, int) { barrier->state = 0; }
inline void bulk_barrier_expect(BulkBarrier*, int) {}
inline void bulk_barrier_wait(BulkBarrier*, int) {}
inline void bulk_store_drain() {}

inline void bulk_load(void* shared, const void* global, int bytes, BulkBarrier*) {
  for (int i = 0; i < bytes / 16; ++i) {
    static_cast<uint4*>(shared)[i] = static_cast<const uint4*>(global)[i];
  }
}

inline void bulk_store(void* global, const void* shared, int bytes) {
  for (int i = 0; i < bytes / 16; ++i) {
    static_cast<uint4*>(global)[i] = static_cast<const uint4*>(shared)[i];
  }
}

#endif
