#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

/// A simulated accelerator, for tests on machines without one. It is PyTorch's device type
/// PrivateUse1, named `sim`. Operators run on the CPU, in the order of the device's streams. As on
/// a GPU, an operator may run later than the host launches it. See docs/devices.md.
namespace tessera::sim {

/// When the work of streams runs. A real device could choose each of these orders.
enum class Schedule {
  lazy,     // as late as possible: when something waits for the work. Deterministic if ranks are.
  eager,    // as early as possible: when the work is launched
  threads,  // on one thread for each stream, after random pauses
};

struct Options {
  Schedule schedule = Schedule::lazy;
  int max_pause_us = 0;    // of `threads`, before each operator
  std::uint64_t seed = 0;  // of the pauses
};

/// Makes the devices `sim:0` to `sim:num_devices - 1`. Call it once in a process, before the first
/// use of a device.
void register_device(int num_devices);
/// Waits for all work, forgets all findings, and changes the schedule.
void restart(const Options& options);
Schedule schedule();

at::Device device(int index);
/// Waits for all work of all devices. Throws what an operator threw.
void synchronize();

/// Returns the races found since the last call, one line each: pairs of accesses to the same memory
/// without a wait between them, and writes of the host to pinned memory that a copy still uses.
/// Every schedule finds such a pair, even if the two accesses happened to run in the right order.
std::vector<std::string> take_races();
/// Returns the names of a device's operators that have made the host wait since the last call.
std::vector<std::string> take_waiting_operators(int device = 0);

struct MemoryUse {
  std::int64_t now = 0;
  std::int64_t peak = 0;  // since `reset_peak`
};
/// Units: bytes.
MemoryUse memory_of(int device);
void reset_peak(int device);
/// Limits the memory of a device to `nbytes`. An allocation beyond the limit throws
/// c10::OutOfMemoryError. `restart` removes the limit.
void limit_memory(int device, std::int64_t nbytes);
/// Makes one allocation of a device throw c10::OutOfMemoryError, after `num_allocations` that
/// succeed. With -1, or after `restart`, none throws.
void fail_allocation_after(int device, int num_allocations);
/// Returns the size of all pinned host memory that is allocated. Units: bytes.
std::int64_t pinned_nbytes();

/// Runs `body` in the order of `stream`, as a kernel that reads and writes the given tensors.
void launch(const c10::Stream& stream, const std::string& name,
            const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes,
            std::function<void()> body);
/// Returns a CPU tensor that shares the memory of `tensor`, for the body of a kernel. Does not keep
/// the memory alive.
at::Tensor in_kernel(const at::Tensor& tensor);

}  // namespace tessera::sim
