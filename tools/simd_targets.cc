// Highway's choice of instruction sets, in place of libhwy's: Debian's library measures the
// resolution of a timer for 4 ms in every process that loads it, a third of what starting the
// command would take. With these two functions here nothing else of it is needed.
#include <hwy/targets.h>

#if HWY_ARCH_X86
#include <cpuid.h>

namespace hwy {
namespace {

bool has_bit(uint32_t leaf, int32_t reg, int32_t bit) {
  uint32_t r[4] = {0, 0, 0, 0};
  return __get_cpuid(leaf, &r[0], &r[1], &r[2], &r[3]) != 0 && (r[reg] >> bit & 1) != 0;
}

int64_t detect_targets() {
  // __builtin_cpu_supports() also asks whether the system saves the registers.
  constexpr uint32_t kFeatures = 1, kExtended = 0x80000001;
  constexpr int32_t kC = 2;
  int64_t targets = HWY_STATIC_TARGET;
  if (!__builtin_cpu_supports("ssse3")) return targets;
  targets |= HWY_SSSE3;
  const bool aes = has_bit(kFeatures, kC, 25), clmul = has_bit(kFeatures, kC, 1);
  if (!__builtin_cpu_supports("sse4.1") || !__builtin_cpu_supports("sse4.2") || !aes || !clmul) {
    return targets;
  }
  targets |= HWY_SSE4;
  const bool f16c = has_bit(kFeatures, kC, 29), lzcnt = has_bit(kExtended, kC, 5);
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2") || !f16c || !lzcnt) {
    return targets;
  }
  targets |= HWY_AVX2;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512cd")) {
    return targets;
  }
  return targets | HWY_AVX3;
}

}  // namespace

int64_t SupportedTargets() {
  static const int64_t kTargets = detect_targets();
  return kTargets;
}

ChosenTarget& GetChosenTarget() {
  static ChosenTarget chosen;
  return chosen;
}

}  // namespace hwy
#endif
