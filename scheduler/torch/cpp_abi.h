// How libtorch's C++ functions take their arguments on this machine: value layouts, registers and stack.
//
// A call is an array of words: six general registers, eight vector registers, then the stack. Every signature of
// `at::_ops::X::call` fits one function type with that many parameters, because a callee reads only what it was given.
//
// Threads:   pure; any thread.
// Source:    System V ABI, x86-64, 3.2.3 (classification); libstdc++'s optional, tuple, vector and string_view;
//            c10/core/Scalar.h, c10/core/SymInt.h, ATen/core/IListRef.h. What is not proved by a mangled name is proved
//            by self_test.cc before it is used.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

namespace cuvil::torch_abi {

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBCXX__)
inline constexpr bool kKnownCppAbi = true;
#else
inline constexpr bool kKnownCppAbi = false;
#endif

inline constexpr int kNumGeneral = 6;
inline constexpr int kNumVector = 8;
inline constexpr int kFirstStack = kNumGeneral + kNumVector;
inline constexpr int kMaxStack = 32;
inline constexpr int kMaxWords = kFirstStack + kMaxStack;

// c10::Scalar: a tag, then a 16-byte aligned union.
struct alignas(16) ScalarLayout {
  enum Tag : int32_t { kDouble = 0, kInt = 1, kComplex = 3, kBool = 4 };
  int32_t tag = kInt;
  alignas(16) uint64_t value[2] = {0, 0};
};
static_assert(sizeof(ScalarLayout) == 32);
inline constexpr int kScalarWords = 4;
inline constexpr int kOptionalScalarWords = 6;  // the flag is word 4, padded to the alignment

// Assigns argument words as the ABI does. Every member returns the index of the (first) word it used, so that a later
// call can patch it.
class ArgumentPacker {
 public:
  ArgumentPacker() : words_(kFirstStack, 0) {}

  // One eightbyte of class INTEGER.
  int Integer(uint64_t word) {
    if (general_ < kNumGeneral) return Set(general_++, word);
    return Push({word});
  }
  // A class of two INTEGER eightbytes: both in registers, or both on the stack.
  int IntegerPair(uint64_t first, uint64_t second) {
    if (general_ + 2 > kNumGeneral) return Push({first, second});
    const int at = Set(general_++, first);
    Set(general_++, second);
    return at;
  }
  int Double(double value) {
    const auto bits = std::bit_cast<uint64_t>(value);
    if (vector_ < kNumVector) return Set(kNumGeneral + vector_++, bits);
    return Push({bits});
  }
  // std::optional<double>: an SSE and an INTEGER eightbyte, both in registers, or both on the stack.
  int DoubleAndInteger(double value, uint64_t word) {
    const auto bits = std::bit_cast<uint64_t>(value);
    if (vector_ >= kNumVector || general_ >= kNumGeneral) return Push({bits, word});
    Set(general_++, word);
    return Set(kNumGeneral + vector_++, bits);
  }
  // A trivially copyable class of more than two eightbytes.
  int Memory(std::initializer_list<uint64_t> words) { return Push(words); }

  bool uses_vector() const { return vector_ > 0; }
  int num_stack() const { return static_cast<int>(words_.size()) - kFirstStack; }
  std::vector<uint64_t> Take() && { return std::move(words_); }

 private:
  int Set(int at, uint64_t word) {
    words_[static_cast<size_t>(at)] = word;
    return at;
  }
  int Push(std::initializer_list<uint64_t> words) {
    const int at = static_cast<int>(words_.size());
    words_.insert(words_.end(), words);
    return at;
  }

  int general_ = 0;
  int vector_ = 0;
  std::vector<uint64_t> words_;
};

// How many words of stack CallWords passes for a callee that takes `num_stack`: function types are made for a few sizes
// only. Words beyond the callee's own are never looked at; the caller pops them.
constexpr int StackWordsRead(int num_stack) {
  if (num_stack == 0) return 0;
  if (num_stack <= 4) return 4;
  if (num_stack <= 12) return 12;
  return kMaxStack;
}

// Calls `function` with the words; `num_stack` of them follow the registers. Gives what the callee left in the first
// result register. May throw what the callee throws.
uint64_t CallWords(void* function, const uint64_t* words, int num_stack, bool uses_vector);

}  // namespace cuvil::torch_abi
