#include "agent/assumptions.h"

#include <Python.h>

#include "absl/strings/str_cat.h"
#include "scheduler/torch/self_test.h"

namespace cuvil::agent {
namespace {

enum class Subject : uint8_t { kInterpreter, kTorch };

struct Row {
  Subject subject;
  const char* name;
  const char* text;
};

constexpr Row kRows[] = {
#define CUVIL_ASSUMPTION(subject, enumerator, name, text) {Subject::k##subject, name, text},
#include "agent/assumptions.def"
#undef CUVIL_ASSUMPTION
};

}  // namespace

absl::Status Violated(Assumption assumption) {
  const Row& row = kRows[static_cast<size_t>(assumption)];
  if (row.subject == Subject::kTorch) {
    return absl::FailedPreconditionError(
        absl::StrCat("this torch keeps ", row.text, " where it is not known; ", kTorchAdvice));
  }
  return absl::UnimplementedError(absl::StrCat(
      "this interpreter differs from CPython ", PY_MAJOR_VERSION, ".", PY_MINOR_VERSION, ": ", row.text,
      "; use a release of CPython 3.11, 3.12 or 3.13, or report this with the output of `python -m cuvil doctor`"));
}

std::vector<std::string> AssumptionNames() {
  std::vector<std::string> names;
  for (const Row& row : kRows) names.emplace_back(row.name);
  return names;
}

absl::Status CorruptAssumption(std::string_view name) {
  Assumption found = Assumption::kNone;
  for (size_t i = 0; i < std::size(kRows); ++i) {
    if (name == kRows[i].name) found = static_cast<Assumption>(i);
  }
  if (found == Assumption::kNone && !name.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("no assumption is called '", std::string(name), "'"));
  }
  assumptions_internal::corrupted = found;
  torch_abi::SelfTest::expects_other_results = found == Assumption::kTorchCalls;
  return absl::OkStatus();
}

}  // namespace cuvil::agent
