// How many blocks an SM shall hold at least, for __launch_bounds__.
#pragma once

// Registers were weighed for Hopper; what `on_hopper` leaves of them makes others spill.
constexpr int resident_blocks(int on_hopper) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  return on_hopper;
#else
  return 1;
#endif
}
