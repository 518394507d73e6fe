#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <string>

#include "simulated_device/clocks.h"
#include "simulated_device/streams.h"

namespace tessera::sim {

/// The memory of all devices. It is mapped twice: tensors point into a mapping that nobody may
/// access, and kernels get the same place in a second mapping (`in_kernel`). So the host faults
/// where it reads device memory.
c10::Allocator* device_allocator();
void record_stream(const c10::DataPtr& memory, const c10::Stream& stream);

/// Returns whether a defined tensor is on a simulated device.
bool is_on_device(const at::Tensor& tensor);
/// Returns the address of the first element. Does not copy shared storages.
const char* address_of(const at::Tensor& tensor);
/// Returns the bytes from the first to the last element of a tensor.
std::size_t extent_of(const at::Tensor& tensor);
/// Returns where kernels find what a tensor has at a device address.
void* kernel_address(const void* device_address);

/// Throws if a tensor of a device has elements and no memory. `name`: of the operator.
void check_memory(const at::Tensor& tensor, const std::string& name);
/// Notes an access of the last launched job. Requires: streams().mutex is held.
void note_access(Stream& stream, const at::Tensor& tensor, AccessLog::Kind kind,
                 const std::string& name);

/// Takes away what `limit_memory` and `fail_allocation_after` set. Requires: streams().mutex is
/// held.
void forget_limits();
/// Empties the logs of all blocks. Requires: streams().mutex is held.
void forget_accesses();

/// Host memory that the device copies from and to while the host goes on.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
/// Notes that the job that `stream` launched last copies from or to pinned memory. Requires: no
/// mutex is held.
void note_pinned_copy(const void* address, const EventState& end, AccessLog::Kind kind);
/// Returns whether no copy from, or to, this pinned memory is pending.
bool is_idle(const void* address, AccessLog::Kind kind);

}  // namespace tessera::sim
