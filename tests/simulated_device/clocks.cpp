#include "simulated_device/clocks.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "simulated_device/device.h"
#include "simulated_device/streams.h"

namespace tessera::sim {
namespace {

struct Findings {
  std::mutex mutex;
  std::vector<std::string> races;
  std::map<int, std::vector<std::string>> waiting_operators;  // by device
};

Findings& findings() {
  static auto* const findings = new Findings;
  return *findings;
}

}  // namespace

void join(Clock& into, const Clock& other) {
  for (const auto& [stream, number] : other) into[stream] = std::max(into[stream], number);
}

void AccessLog::note(const Stream& stream, Range range, Kind kind, const std::string& name) {
  std::erase_if(accesses_, [&](const Access& old) {
    if (old.range.end <= range.begin || range.end <= old.range.begin) return false;
    const auto known = stream.clock.find(old.stream->number);
    const bool is_before =
        old.stream == &stream || (known != stream.clock.end() && known->second >= old.number);
    if (!is_before && (kind == Kind::write || old.kind == Kind::write)) {
      report_race(name + " on stream " + std::to_string(stream.id) +
                  (kind == Kind::write ? " writes" : " reads") + " what " + old.name +
                  " on stream " + std::to_string(old.stream->id) +
                  (old.kind == Kind::write ? " wrote" : " read") + ", without waiting for it");
    }
    const bool covers = range.begin <= old.range.begin && old.range.end <= range.end;
    return is_before && covers && (kind == Kind::write || old.kind == Kind::read);
  });
  accesses_.push_back({&stream, stream.num_launched, range, kind, name});
}

void report_race(std::string what) {
  const std::lock_guard lock(findings().mutex);
  findings().races.push_back(std::move(what));
}

void report_waiting_operator(int device, std::string name) {
  const std::lock_guard lock(findings().mutex);
  findings().waiting_operators[device].push_back(std::move(name));
}

void forget_findings() {
  const std::lock_guard lock(findings().mutex);
  findings().races.clear();
  findings().waiting_operators.clear();
}

std::vector<std::string> take_races() {
  const std::lock_guard lock(findings().mutex);
  return std::exchange(findings().races, {});
}

std::vector<std::string> take_waiting_operators(int device) {
  const std::lock_guard lock(findings().mutex);
  return std::exchange(findings().waiting_operators[device], {});
}

}  // namespace tessera::sim
