#include "simulated_device/streams.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "simulated_device/memory.h"

namespace tessera::sim {
namespace {

constexpr std::size_t kPoolSize = 32;
constexpr auto kPatience = std::chrono::seconds(30);  // how long a wait lasts before it throws

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::vector<c10::StreamId> streams_of_thread;  // by device

bool uses_threads() {
  return streams().options.schedule == Schedule::threads;
}

bool advance(Stream& stream, std::uint64_t number);

/// Returns whether the other stream's job for which `job` waits is done. Unless streams have
/// threads, first runs the jobs of that stream that can run.
bool has_awaited(const Job& job) {
  if (job.awaited == nullptr || job.awaited->num_done >= job.awaited_number) return true;
  return !uses_threads() && advance(*job.awaited, job.awaited_number);
}

/// Returns whether a rank's stream has reached its job of the rendezvous. Unless streams have
/// threads, first runs the jobs of that stream that can run.
bool has_reached(Rendezvous::Arrival& arrival) {
  if (arrival.has_reached) return true;
  if (uses_threads() || arrival.stream == nullptr) return false;
  Stream& peer = *arrival.stream;
  if (peer.num_done + 1 < arrival.number) advance(peer, arrival.number - 1);
  if (peer.num_done + 1 < arrival.number || !has_awaited(peer.queue.front())) return false;
  arrival.has_reached = true;
  return true;
}

bool is_ready(Job& job) {
  if (!has_awaited(job)) return false;
  if (!job.rendezvous) return true;
  Rendezvous& all = *job.rendezvous;
  if (!std::exchange(all.arrivals[job.rank].has_reached, true)) streams().changed.notify_all();
  bool are_all_there = true;
  for (auto& arrival : all.arrivals) are_all_there = has_reached(arrival) && are_all_there;
  return are_all_there;
}

/// Runs the job. Returns what it threw, or nullptr.
std::exception_ptr run(Job& job) {
  try {
    const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const c10::impl::ExcludeDispatchKeyGuard no_views(
        c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
    const at::NoGradGuard no_grad;
    if (job.rendezvous) {
      if (const auto body = std::exchange(job.rendezvous->body, nullptr)) body();
    } else if (job.run) {
      job.run();
    }
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

/// Notes that the first job of a stream has ended. Requires: streams().mutex is held.
void finish(Stream& stream, std::exception_ptr failure) {
  if (!streams().failure) streams().failure = std::move(failure);
  ++stream.num_done;
  streams().changed.notify_all();
}

Job take_first(Stream& stream) {
  Job job = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (stream.queue.empty()) streams().busy.erase(&stream);
  return job;
}

/// Runs the jobs of a stream up to number `number`, and the jobs of other streams for which they
/// wait. Stops at a job that cannot run yet. Returns whether all jobs up to `number` are done.
bool advance(Stream& stream, std::uint64_t number) {
  if (stream.is_advancing) return false;
  stream.is_advancing = true;
  while (stream.num_done < number && is_ready(stream.queue.front())) {
    Job job = take_first(stream);
    finish(stream, run(job));
  }
  stream.is_advancing = false;
  return stream.num_done >= number;
}

std::string place_of(const Stream& stream) {
  return "stream " + std::to_string(stream.id) + " of device " + std::to_string(stream.device);
}

/// Returns a line for each stream with jobs: what the stream waits for.
std::string description_of_busy_streams() {
  std::string text;
  for (const Stream* const stream : streams().busy) {
    const Job& job = stream->queue.front();
    text += "\n" + place_of(*stream) + " has done " + std::to_string(stream->num_done) + " of " +
            std::to_string(stream->num_launched) + " jobs";
    if (job.awaited != nullptr && job.awaited->num_done < job.awaited_number) {
      text +=
          "; waits for job " + std::to_string(job.awaited_number) + " of " + place_of(*job.awaited);
    }
    if (!job.rendezvous) continue;
    for (const auto& arrival : job.rendezvous->arrivals) {
      text += arrival.stream == nullptr ? "; waits for a rank that has launched nothing"
                                        : "; meets job " + std::to_string(arrival.number) + " of " +
                                              place_of(*arrival.stream);
    }
  }
  return text;
}

/// The loop of a stream's thread. It never ends.
void work(Stream& stream) {
  at::set_num_threads(1);
  Streams& all = streams();
  std::unique_lock lock(all.mutex);
  while (true) {
    stream.has_job.wait(lock, [&] { return uses_threads() && !stream.queue.empty(); });
    all.changed.wait(lock, [&] { return is_ready(stream.queue.front()); });
    std::exception_ptr failure;
    {
      Job job = take_first(stream);
      const int max_pause_us = all.options.max_pause_us;
      const bool is_of_one_stream = job.rendezvous == nullptr;
      if (is_of_one_stream) lock.unlock();
      if (max_pause_us > 0 && is_of_one_stream) {
        std::this_thread::sleep_for(
            std::chrono::microseconds(stream.pauses() % static_cast<unsigned>(max_pause_us)));
      }
      failure = run(job);
      job = {};
      if (is_of_one_stream) lock.lock();
    }
    finish(stream, std::move(failure));
  }
}

}  // namespace

Streams& streams() {
  static auto* const streams = new Streams;
  return *streams;
}

c10::DeviceIndex current_device() {
  return device_of_thread;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  return std::exchange(device_of_thread, device < 0 ? device_of_thread : device);
}

Stream& state_of(const c10::Stream& stream) {
  const std::lock_guard lock(streams().mutex);
  return *streams()
              .by_device.at(static_cast<std::size_t>(stream.device_index()))
              .at(static_cast<std::size_t>(stream.id()));
}

c10::Stream stream_with(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, at::Device(kSim, device), id);
}

c10::Stream new_stream(c10::DeviceIndex device) {
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  auto& of_device = all.by_device.at(static_cast<std::size_t>(device));
  // Number 0 is the default stream.
  std::size_t& num_taken = all.num_taken.at(static_cast<std::size_t>(device));
  const std::size_t id = of_device.empty() ? 0 : 1 + num_taken++ % kPoolSize;
  if (id < of_device.size()) return stream_with(device, static_cast<c10::StreamId>(id));
  auto* const made = new Stream{.number = all.num_streams++,
                                .device = device,
                                .id = static_cast<c10::StreamId>(of_device.size())};
  made->pauses.seed(static_cast<unsigned>(all.options.seed) + static_cast<unsigned>(made->number));
  of_device.push_back(made);
  return stream_with(device, made->id);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (streams_of_thread.empty()) streams_of_thread.resize(streams().by_device.size());
  return stream_with(device, streams_of_thread.at(static_cast<std::size_t>(device)));
}

c10::Stream exchange_stream(c10::Stream stream) {
  const c10::Stream before = current_stream(stream.device_index());
  streams_of_thread.at(static_cast<std::size_t>(stream.device_index())) = stream.id();
  return before;
}

std::uint64_t enqueue(Stream& stream, Job job) {
  Streams& all = streams();
  join(stream.clock, all.host_clock[static_cast<std::size_t>(stream.device)]);
  ++stream.num_launched;
  stream.clock[stream.number] = stream.num_launched;
  if (job.rendezvous) {
    auto& arrival = job.rendezvous->arrivals[job.rank];
    arrival.stream = &stream;
    arrival.number = stream.num_launched;
  }
  stream.queue.push_back(std::move(job));
  all.busy.insert(&stream);
  if (uses_threads()) {
    if (!stream.thread.joinable()) stream.thread = std::thread([&stream] { work(stream); });
    stream.has_job.notify_one();
  }
  return stream.num_launched;
}

void launched() {
  Streams& all = streams();
  if (all.options.schedule == Schedule::eager) {
    bool has_moved = true;
    while (has_moved) {
      has_moved = false;
      const std::vector<Stream*> busy(all.busy.begin(), all.busy.end());
      for (Stream* const stream : busy) {
        const std::uint64_t before = stream->num_done;
        advance(*stream, stream->num_launched);
        has_moved = has_moved || stream->num_done > before;
      }
    }
  }
  all.changed.notify_all();
}

EventState event_at_end(const Stream& stream) {
  return {const_cast<Stream*>(&stream), stream.num_launched, stream.clock};
}

void make_wait(Stream& waiting, const EventState& event) {
  if (event.stream == nullptr) return;
  const std::lock_guard lock(streams().mutex);
  join(waiting.clock, event.clock);
  enqueue(waiting, {.awaited = event.stream, .awaited_number = event.number});
  launched();
}

bool is_done(const EventState& event) {
  if (event.stream == nullptr) return true;
  const std::lock_guard lock(streams().mutex);
  if (event.stream->num_done < event.number) return false;
  join(streams().host_clock[static_cast<std::size_t>(event.stream->device)], event.clock);
  return true;
}

void wait_for(const EventState& event) {
  if (event.stream == nullptr) return;
  Streams& all = streams();
  Stream& stream = *event.stream;
  std::unique_lock lock(all.mutex);
  const auto end = std::chrono::steady_clock::now() + kPatience;
  const auto is_there = [&] {
    return uses_threads() ? stream.num_done >= event.number : advance(stream, event.number);
  };
  while (!is_there()) {
    all.changed.wait_for(lock, std::chrono::milliseconds(20));
    TORCH_CHECK(std::chrono::steady_clock::now() < end, "sim: ", place_of(stream),
                " does not end: did another rank not start a collective?",
                description_of_busy_streams());
  }
  join(all.host_clock[static_cast<std::size_t>(stream.device)], event.clock);
  if (all.failure) std::rethrow_exception(std::exchange(all.failure, nullptr));
}

void synchronize_stream(const c10::Stream& stream) {
  Stream& state = state_of(stream);
  std::unique_lock lock(streams().mutex);
  const EventState end = event_at_end(state);
  lock.unlock();
  wait_for(end);
}

void submit(const c10::Stream& stream, Job job, const std::string& name,
            const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes) {
  for (const at::Tensor& tensor : reads) check_memory(tensor, name);
  for (const at::Tensor& tensor : writes) check_memory(tensor, name);
  Stream& state = state_of(stream);
  const std::lock_guard lock(streams().mutex);
  enqueue(state, std::move(job));
  for (const at::Tensor& tensor : reads) note_access(state, tensor, AccessLog::Kind::read, name);
  for (const at::Tensor& tensor : writes) note_access(state, tensor, AccessLog::Kind::write, name);
  launched();
}

void launch(const c10::Stream& stream, const std::string& name,
            const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes,
            std::function<void()> body) {
  submit(stream, {.run = std::move(body)}, name, reads, writes);
}

void synchronize() {
  for (std::size_t device = 0; device < streams().by_device.size(); ++device) {
    std::unique_lock lock(streams().mutex);
    const auto of_device = streams().by_device[device];
    lock.unlock();
    for (const Stream* const stream : of_device) {
      synchronize_stream(stream_with(stream->device, stream->id));
    }
  }
}

Schedule schedule() {
  return streams().options.schedule;
}

at::Device device(int index) {
  return {kSim, static_cast<c10::DeviceIndex>(index)};
}

void restart(const Options& options) {
  synchronize();
  {
    const std::lock_guard lock(streams().mutex);
    streams().options = options;
    for (const auto& of_device : streams().by_device) {
      for (Stream* const stream : of_device) {
        stream->pauses.seed(static_cast<unsigned>(options.seed) +
                            static_cast<unsigned>(stream->number));
        stream->clock.clear();
      }
    }
    // All work is done, so all clocks may begin at zero again.
    for (Clock& clock : streams().host_clock) clock.clear();
    forget_accesses();
    forget_limits();
    std::ranges::fill(streams().num_taken, std::size_t{0});
  }
  forget_findings();
}

void register_device(int num_devices) {
  const auto num = static_cast<std::size_t>(num_devices);
  streams().by_device.resize(num);
  streams().host_clock.resize(num);
  streams().num_taken.resize(num);
  for (int device = 0; device < num_devices; ++device) {
    new_stream(static_cast<c10::DeviceIndex>(device));  // the default stream
  }
  c10::register_privateuse1_backend("sim");
  register_memory(num_devices);
  register_guard();
  register_hooks(num_devices);
}

}  // namespace tessera::sim
