#include "scheduler/torch/warning_notice.h"

namespace cuvil::torch_abi {

WarningNotice::Handler::~Handler() = default;

void WarningNotice::Handler::Process(const void*) { noticed = true; }

}  // namespace cuvil::torch_abi
