#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

/// A simulated accelerator, for tests on machines without one. It is PyTorch's device type
/// PrivateUse1, named `sim`. Operators run on the CPU, in the order of the device's streams and
/// later than the host launches them. See docs/devices.md.
namespace tessera::sim {

/// When the work of streams runs. Each order is one that a real device could choose.
enum class Schedule {
  lazy,     // when somebody waits for it: the latest order. Deterministic if ranks are.
  eager,    // when it is launched: the earliest order
  threads,  // on one thread for each stream, after drawn pauses
};

struct Options {
  Schedule schedule = Schedule::lazy;
  int max_pause_us = 0;    // of `threads`, before each operator
  std::uint64_t seed = 0;  // of the pauses
};

/// Makes the devices `sim:0` to `sim:num_devices - 1`. Once for a process, before it uses a device.
void register_device(int num_devices);
/// Waits for all work, forgets all findings, and changes the schedule.
void restart(const Options& options);
Schedule schedule();

at::Device device(int index);
/// Waits for all work of all devices. Throws what an operator threw.
void synchronize();

/// Returns what was found since the last call: pairs of accesses to memory that no wait puts in
/// order, and writes of the host to pinned memory that a copy still uses. Pairs of accesses are
/// found under every schedule, also if they happened to run in a harmless order.
std::vector<std::string> take_races();
/// Returns the names of a device's operators that made the host wait, since the last call.
std::vector<std::string> take_waiting_operators(int device = 0);

struct MemoryUse {
  std::int64_t now = 0;
  std::int64_t peak = 0;  // since `reset_peak`
};
/// Units: bytes.
MemoryUse memory_of(int device);
void reset_peak(int device);
/// Lets a device have at most `nbytes` of memory: an allocation beyond throws
/// c10::OutOfMemoryError. `restart` takes the limit away.
void limit_memory(int device, std::int64_t nbytes);
/// Lets one allocation of a device throw c10::OutOfMemoryError: the one after the next
/// `num_allocations`. -1, and `restart`: none.
void fail_allocation_after(int device, int num_allocations);
/// Returns how much pinned memory of the host is allocated. Units: bytes.
std::int64_t pinned_nbytes();

/// Runs `body` in the order of `stream`, as a kernel that reads and writes the given tensors.
void launch(const c10::Stream& stream, const std::string& name,
            const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes,
            std::function<void()> body);
/// Returns a CPU tensor in the memory of `tensor`, for the body of a kernel. Does not keep the
/// memory alive.
at::Tensor in_kernel(const at::Tensor& tensor);

}  // namespace tessera::sim
