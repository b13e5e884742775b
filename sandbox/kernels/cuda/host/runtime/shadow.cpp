#include "shadow.h"

Conflict SharedShadow::with_writer(const Byte& byte, unsigned thread) const {
  if (byte.writer == nobody || !unordered(byte.writer, byte.writer_sync, thread)) return {};
  const Access earlier = byte.atomic ? Access::atomic : Access::write;
  return {Conflict::race, byte.writer, earlier, byte.writer_code};
}

Conflict SharedShadow::with_readers(const Byte& byte, unsigned thread) const {
  const uint16_t warp = uint16_t(thread / 32);
  if (byte.reader != nobody) {
    if (byte.reader / 32 != warp)
      return {Conflict::race, byte.reader, Access::read, byte.reader_code};
    const uint32_t others = byte.reader_lanes & ~(1u << thread % 32);
    if (others && byte.reader_sync == warp_syncs_[warp])
      return {Conflict::race, uint16_t(warp * 32 + __builtin_ctz(others)), Access::read,
              byte.reader_code};
  }
  if (byte.far_reader != nobody && byte.far_reader / 32 != warp)
    return {Conflict::race, byte.far_reader, Access::read, byte.far_code};
  return {};
}

void SharedShadow::record_read(Byte& byte, unsigned thread, uint32_t code) {
  const unsigned warp = thread / 32;
  const bool fresh = byte.reader == nobody || unsigned(byte.reader / 32) != warp ||
                     byte.reader_sync != warp_syncs_[warp];
  if (fresh) {
    if (byte.reader != nobody && unsigned(byte.reader / 32) != warp) {
      byte.far_reader = byte.reader;
      byte.far_code = byte.reader_code;
    }
    byte.reader_lanes = 0;
  }
  byte.reader = uint16_t(thread);
  byte.reader_lanes |= 1u << thread % 32;
  byte.reader_sync = warp_syncs_[warp];
  byte.reader_code = code;
}

Conflict SharedShadow::access(size_t first, size_t count, unsigned thread, Access kind,
                              uint32_t code) {
  for (size_t i = 0; i < count; ++i) {
    Byte& byte = bytes_[first + i];
    Conflict found;
    if (byte.in_flight_in == block_) {
      found = {Conflict::in_flight, byte.writer, Access::write, byte.writer_code};
    } else if (kind != Access::write && byte.written_in != block_) {
      found.kind = Conflict::unwritten;
    } else if (byte.interval == interval_) {
      if (kind != Access::atomic || !byte.atomic) found = with_writer(byte, thread);
      if (!found.kind && kind != Access::read) found = with_readers(byte, thread);
    }
    if (found.kind) {
      found.byte = i;
      return found;
    }
    if (byte.interval != interval_) {
      byte.interval = interval_;
      byte.writer = byte.reader = byte.far_reader = nobody;
    }
    if (kind == Access::read) {
      record_read(byte, thread, code);
    } else {
      byte.writer = uint16_t(thread);
      byte.writer_sync = warp_syncs_[thread / 32];
      byte.writer_code = code;
      byte.atomic = kind == Access::atomic;
      byte.written_in = block_;
    }
  }
  return {};
}

Conflict SharedShadow::start_copy(size_t first, size_t count, unsigned thread, uint32_t code) {
  const Conflict found = access(first, count, thread, Access::write, code);
  for (size_t i = 0; i < count; ++i) bytes_[first + i].in_flight_in = block_;
  return found;
}

Conflict SharedShadow::finish_copy(size_t first, size_t count, unsigned thread) {
  for (size_t i = 0; i < count; ++i) bytes_[first + i].in_flight_in = 0;
  return access(first, count, thread, Access::write, bytes_[first].writer_code);
}
