#include "scheduler/torch/cpp_abi.h"

#include <cstddef>
#include <cstdlib>

namespace cuvil::torch_abi {
namespace {

template <size_t>
using Word = uint64_t;
template <size_t>
using Vector = double;

template <size_t... general, size_t... vector, size_t... stack>
uint64_t Call(void* function, const uint64_t* words, std::index_sequence<general...>, std::index_sequence<vector...>,
              std::index_sequence<stack...>) {
  using Function = uint64_t (*)(Word<general>..., Vector<vector>..., Word<stack>...);
  return reinterpret_cast<Function>(function)(words[general]..., std::bit_cast<double>(words[kNumGeneral + vector])...,
                                              words[kFirstStack + stack]...);
}

template <size_t num_vector, size_t num_stack>
uint64_t CallAs(void* function, const uint64_t* words) {
  return Call(function, words, std::make_index_sequence<kNumGeneral>(), std::make_index_sequence<num_vector>(),
              std::make_index_sequence<num_stack>());
}

}  // namespace

uint64_t CallWords(void* function, const uint64_t* words, int num_stack, bool uses_vector) {
  switch (StackWordsRead(num_stack)) {
    case 0:
      return uses_vector ? CallAs<kNumVector, 0>(function, words) : CallAs<0, 0>(function, words);
    case 4:
      return CallAs<kNumVector, 4>(function, words);
    case 12:
      return CallAs<kNumVector, 12>(function, words);
    case kMaxStack:
      return CallAs<kNumVector, kMaxStack>(function, words);
  }
  std::abort();  // The packer's user checks the limit.
}

}  // namespace cuvil::torch_abi
