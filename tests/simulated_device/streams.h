#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "simulated_device/clocks.h"
#include "simulated_device/device.h"

namespace tessera::sim {

inline constexpr auto kSim = c10::DeviceType::PrivateUse1;

struct Stream;

/// A collective of several ranks. Each rank's stream has a job for it. It runs when all these
/// streams have reached these jobs.
struct Rendezvous {
  explicit Rendezvous(std::size_t num_ranks) : arrivals(num_ranks) {}
  struct Arrival {
    Stream* stream = nullptr;  // null until the rank has launched its part
    std::uint64_t number = 0;  // of the job on that stream
    bool has_reached = false;
  };
  std::vector<Arrival> arrivals;
  std::function<void()> body;  // null after it has run
};

/// A unit of work of a stream.
struct Job {
  std::function<void()> run{};
  Stream* awaited = nullptr;  // runs after `awaited` has done `awaited_number`
  std::uint64_t awaited_number = 0;
  std::shared_ptr<Rendezvous> rendezvous{};
  std::size_t rank = 0;  // index in `rendezvous->arrivals`
};

/// A queue of jobs, which run in order. Jobs are numbered from 1.
struct Stream {
  int number;  // among the streams of all devices
  c10::DeviceIndex device;
  c10::StreamId id;
  std::deque<Job> queue{};
  std::uint64_t num_launched = 0;
  std::uint64_t num_done = 0;
  bool is_advancing = false;
  Clock clock{};
  std::minstd_rand pauses{};
  std::thread thread{};               // for Schedule::threads, from the first job on
  std::condition_variable has_job{};  // for the thread
};

/// A place in a stream: after job `number`. `clock`: the jobs that are known to be done when the
/// stream has reached this place.
struct EventState {
  Stream* stream = nullptr;
  std::uint64_t number = 0;
  Clock clock{};
};

/// All streams of all devices. The process has one such object. It is never destroyed, because the
/// threads of streams never end.
struct Streams {
  std::mutex mutex;  // guards all streams, blocks and clocks
  std::condition_variable changed;
  Options options;
  std::vector<std::vector<Stream*>> by_device;
  std::vector<std::size_t> num_taken;  // by device: calls of `new_stream` since `restart`
  std::set<Stream*> busy;              // streams with jobs that have not begun
  std::vector<Clock> host_clock;       // by device: the jobs that the host has waited for
  std::exception_ptr failure;          // thrown by a job; the next wait of the host throws it
  int num_streams = 0;
};
Streams& streams();

Stream& state_of(const c10::Stream& stream);
c10::Stream stream_with(c10::DeviceIndex device, c10::StreamId id);
/// Returns a new stream, for the first 32 calls of a device. Later calls return these 32 streams
/// again, in turn, as CUDA does.
c10::Stream new_stream(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

/// Adds a job. Requires: streams().mutex is held. Call `launched` afterwards.
std::uint64_t enqueue(Stream& stream, Job job);
/// Runs new jobs if the schedule says that they run now. Requires: streams().mutex is held.
void launched();
EventState event_at_end(const Stream& stream);
void make_wait(Stream& waiting, const EventState& event);
bool is_done(const EventState& event);
/// Makes the host wait for `event`. Throws what an operator threw.
void wait_for(const EventState& event);
void synchronize_stream(const c10::Stream& stream);

/// Enqueues a job, and notes which tensors it reads and writes.
void submit(const c10::Stream& stream, Job job, const std::string& name,
            const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes);

// These functions register with PyTorch what a device type needs. Each is in the file of its name,
// such as guard.cpp.
void register_guard();
void register_hooks(int num_devices);
void register_memory(int num_devices);

}  // namespace tessera::sim
