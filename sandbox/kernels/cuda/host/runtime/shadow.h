// Who touched each byte of shared memory since the last barrier.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

enum class Access : uint8_t { read, write, atomic };

// Why an access is wrong.
struct Conflict {
  enum Kind : uint8_t { none, unwritten, in_flight, race } kind = none;
  uint16_t thread = 0;  // the other one, its access and where that was
  Access access = Access::read;
  uint32_t code = 0;
  size_t byte = 0;  // where it was found, from the first of the access
};

class SharedShadow {
 public:
  void resize(size_t bytes) { bytes_.assign(bytes, Byte()); }
  void begin_block() { ++interval_, ++block_; }
  void block_barrier() { ++interval_; }
  void warp_barrier(unsigned warp) { ++warp_syncs_[warp]; }

  // Checks and records an access to the bytes from `first` by the thread of this index in its
  // block. Two accesses are in order when a barrier of the block lies between them, or a
  // __syncwarp between those of one warp.
  Conflict access(size_t first, size_t count, unsigned thread, Access kind, uint32_t code);

  // From issue to completion of a cp.async no one may touch its destination.
  Conflict start_copy(size_t first, size_t count, unsigned thread, uint32_t code);
  Conflict finish_copy(size_t first, size_t count, unsigned thread);

 private:
  static constexpr uint16_t nobody = 0xffff;

  struct Byte {
    uint32_t interval = 0;    // of the records that follow; later they mean nothing
    uint32_t written_in = 0;  // block
    uint32_t in_flight_in = 0;
    uint16_t writer = nobody;
    uint16_t reader = nobody;      // the last, with those of its warp since the warp's last sync
    uint16_t far_reader = nobody;  // one of another warp
    bool atomic = false;           // the write
    uint32_t writer_sync = 0, reader_sync = 0;
    uint32_t reader_lanes = 0;
    uint32_t writer_code = 0, reader_code = 0, far_code = 0;
  };

  bool unordered(uint16_t earlier, uint32_t sync, unsigned thread) const {
    return earlier != thread &&
           (earlier / 32 != int(thread / 32) || sync == warp_syncs_[earlier / 32]);
  }
  Conflict with_writer(const Byte& byte, unsigned thread) const;
  Conflict with_readers(const Byte& byte, unsigned thread) const;
  void record_read(Byte& byte, unsigned thread, uint32_t code);

  std::vector<Byte> bytes_;
  uint32_t interval_ = 0, block_ = 0;
  uint32_t warp_syncs_[32] = {};
};
