#include "scheduler/machine_report.h"

namespace cuvil::scheduler {

MachineReport ProbeMachine() {
  return {device::ProbeDriver(), device::ProbeVendorLibraries(), device::ReadNumaNodes()};
}

}  // namespace cuvil::scheduler
