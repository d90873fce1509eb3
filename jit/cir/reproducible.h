// Which operators give the same bits for the same operands whenever, and on whichever thread of the same floating-point
// mode, they run; what is computed once for all calls, or read while a call is traced, must be made by such ones only.
//
// Threads:   pure; any thread.
// Source:    aten/src/ATen: Parallel.h and TensorIterator.h (work is split among threads above at::internal::GRAIN_SIZE
//            elements), Context.h (switches).
#pragma once

#include <cstdint>

#include "jit/cir/graph.h"

namespace cuvil::cir {

// torch computes on one thread up to here (reductions; elementwise operators one element longer). Above it the number
// of threads shows in floating-point results: where the parts meet, vector and scalar code round differently, sums are
// taken in another order, and the other threads have floating-point modes of their own.
inline constexpr int64_t kMaxElementsOfOneThread = 32767;

// False for products, convolutions, transforms and whatever else has a switch (oneDNN, float32 precision, deterministic
// algorithms) or a library of its own, and for every operator that is not known to be different. Says nothing of
// randomness and of memory that nobody wrote (IsPure).
bool IsReproducible(const Graph& graph, const Op& op);

}  // namespace cuvil::cir
