#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <string>

#include "simulated_device/clocks.h"
#include "simulated_device/streams.h"

namespace tessera::sim {

/// The memory of all devices. It is mapped twice. Tensors point into a mapping without access
/// rights, so the host gets a segmentation fault if it reads or writes device memory. Kernels use
/// the same memory through a second mapping (`in_kernel`).
c10::Allocator* device_allocator();
void record_stream(const c10::DataPtr& memory, const c10::Stream& stream);

/// Returns whether a defined tensor is on a simulated device.
bool is_on_device(const at::Tensor& tensor);
/// Returns the address of the first element. Does not copy shared storages.
const char* address_of(const at::Tensor& tensor);
/// Returns the number of bytes from the first to the last element of a tensor.
std::size_t extent_of(const at::Tensor& tensor);
/// Returns the address at which kernels have the memory at `device_address`.
void* kernel_address(const void* device_address);

/// Throws if a tensor on a device has elements but no memory. `name`: the name of the operator.
void check_memory(const at::Tensor& tensor, const std::string& name);
/// Notes an access of the last launched job. Requires: streams().mutex is held.
void note_access(Stream& stream, const at::Tensor& tensor, AccessLog::Kind kind,
                 const std::string& name);

/// Removes the limits that `limit_memory` and `fail_allocation_after` have set. Requires:
/// streams().mutex is held.
void forget_limits();
/// Empties the logs of all blocks. Requires: streams().mutex is held.
void forget_accesses();

/// The allocator of pinned host memory. The device copies from and to this memory while the host
/// continues.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
/// Notes that a job copies from (Kind::read) or to (Kind::write) pinned memory, and is done at
/// `end`. Requires: no mutex is held.
void note_pinned_copy(const void* address, const EventState& end, AccessLog::Kind kind);
/// Returns whether no copy from (Kind::read) or to (Kind::write) this pinned memory is pending.
bool is_idle(const void* address, AccessLog::Kind kind);

}  // namespace tessera::sim
