// Programmatic dependent launch (sm_90 and newer), for kernels declared with overlap=True.
#pragma once

// First statement of such a kernel, before it touches global memory: the next kernel's blocks may
// come up from now on, and this one goes on when all kernels before it are done and their writes
// are visible. Nothing to do where kernels do not overlap.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}
