// What the processor does with denormal numbers and with digits that do not fit: a register of each thread, which
// torch.set_flush_denormal() sets for its caller only.
//
// Threads:   the register is the calling thread's; threads are born with that of the thread that makes them.
// Source:    Intel 64 and IA-32 SDM, volume 1, 10.2.3 (MXCSR); Arm ARM, C5.2.8 (FPCR).
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cuvil::scheduler {

// The bits that decide about values, none about exceptions; zero is what processes start with.
inline uint32_t FloatingPointMode() {
#if defined(__x86_64__)
  constexpr uint32_t kFlushToZero = 0x8000, kRounding = 0x6000, kDenormalsAreZeros = 0x0040;
  return _mm_getcsr() & (kFlushToZero | kRounding | kDenormalsAreZeros);
#elif defined(__aarch64__)
  constexpr uint64_t kAlternativeHalf = 1u << 26, kDefaultNan = 1u << 25, kFlushToZero = 1u << 24, kRounding = 3u << 22,
                     kFlushHalfToZero = 1u << 19, kExtended = 7u;
  uint64_t control = 0;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return static_cast<uint32_t>(
      control & (kAlternativeHalf | kDefaultNan | kFlushToZero | kRounding | kFlushHalfToZero | kExtended));
#else
#error "name this processor's floating-point control bits"
#endif
}

// Lets the calling thread compute in another thread's mode for as long as it lives.
class FloatingPointModeScope {
 public:
  explicit FloatingPointModeScope(uint32_t mode) : before_(FloatingPointMode()) { Set(before_, mode); }
  ~FloatingPointModeScope() { Set(FloatingPointMode(), before_); }
  FloatingPointModeScope(const FloatingPointModeScope&) = delete;
  FloatingPointModeScope& operator=(const FloatingPointModeScope&) = delete;

 private:
  static void Set(uint32_t from, uint32_t to) {
    if (from == to) return;
#if defined(__x86_64__)
    _mm_setcsr((_mm_getcsr() & ~from) | to);
#else
    uint64_t control = 0;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    control = (control & ~uint64_t{from}) | to;
    asm volatile("msr fpcr, %0" : : "r"(control));
#endif
  }

  const uint32_t before_;
};

}  // namespace cuvil::scheduler
