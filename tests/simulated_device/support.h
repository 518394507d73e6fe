#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/Event.h>
#include <gmock/gmock.h>

#include "simulated_device/device.h"
#include "support/random.h"

namespace tessera::test {

/// Waits for the device's work, and restarts the device under a schedule.
inline void restart_under(sim::Schedule schedule) {
  const bool pauses = schedule == sim::Schedule::threads;
  sim::restart(
      {.schedule = schedule, .max_pause_us = pauses ? 200 : 0, .seed = pauses ? test_seed() : 0});
}

/// Runs each test once under every schedule.
class OnEachSchedule : public ::testing::TestWithParam<sim::Schedule> {
 protected:
  void SetUp() override { restart_under(GetParam()); }
  void TearDown() override { sim::synchronize(); }
};

inline std::string name_of(sim::Schedule schedule) {
  switch (schedule) {
    case sim::Schedule::lazy:
      return "Lazy";
    case sim::Schedule::eager:
      return "Eager";
    case sim::Schedule::threads:
      return "Threads";
  }
  return "";
}
inline std::string name_of_schedule(const ::testing::TestParamInfo<sim::Schedule>& info) {
  return name_of(info.param);
}

/// Makes later work on `waiting` wait for all present work on `awaited`.
inline void make_wait(const c10::Stream& waiting, const c10::Stream& awaited) {
  c10::Event event(awaited.device_type());
  event.record(awaited);
  event.block(waiting);
}

}  // namespace tessera::test
