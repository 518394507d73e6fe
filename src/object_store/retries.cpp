#include "object_store/retries.h"

#include <algorithm>
#include <cstdlib>
#include <random>
#include <stop_token>
#include <thread>

#include "base/current_stop.h"
#include "object_store/curl_library.h"
#include "tessera/base/error.h"

namespace tessera::object_store {

RetryPolicy RetryPolicy::of_process() {
  RetryPolicy policy;
  if (const char* text = std::getenv("AWS_MAX_ATTEMPTS")) {
    const int wanted = std::atoi(text);
    if (wanted >= 1 && wanted <= 100) policy.max_attempts = wanted;
  }
  return policy;
}

bool Retries::wait_after(const HttpResponse& response) {
  ++num_attempts_;
  ++num_without_progress_;
  if (!response.may_succeed_later()) return false;
  const std::stop_token stop = tessera::detail::CurrentStop::token();
  const auto give_up = [&] {
    if (stop.stop_requested()) throw Error(ErrorKind::interrupted, {}, "interrupted");
    return false;
  };
  const bool is_last_after_stop = num_without_progress_ >= policy_.max_attempts_after_stop;
  if (stop.stop_requested() && is_last_after_stop) return give_up();
  const bool is_silent = response.curl_code == curl::kCouldntConnect ||
                         response.curl_code == curl::kCouldntResolveHost ||
                         response.curl_code == curl::kCouldntResolveProxy;
  const int max_attempts = is_silent
                               ? std::min(policy_.max_attempts, policy_.max_attempts_without_server)
                               : policy_.max_attempts;
  if (num_without_progress_ >= max_attempts) return give_up();
  auto wait = policy_.first_wait * (1 << std::min(num_without_progress_ - 1, 16));
  wait = std::min(wait, policy_.max_wait);
  // Wait a random time, so that requests that failed together are not repeated together.
  thread_local std::minstd_rand random{std::random_device{}()};
  wait = wait / 2 + wait * static_cast<int>(random() % 1000) / 2000;
  const int asked_seconds = std::atoi(response.header("retry-after").c_str());
  if (asked_seconds > 0) {
    const std::chrono::milliseconds asked(asked_seconds * 1000L);
    wait = std::max(wait, asked);
    // The server said that this time brings no byte, so it does not count.
    const auto free = std::min(asked, policy_.max_asked - asked_);
    asked_ += free;
    begin_ += free;
  }
  if (std::chrono::steady_clock::now() + wait - begin_ > policy_.deadline) return give_up();
  constexpr std::chrono::milliseconds kNap{50};
  const auto may_wait = [&] { return !are_transfers_aborted() && !stop.stop_requested(); };
  for (; wait.count() > 0 && may_wait(); wait -= kNap) {
    std::this_thread::sleep_for(std::min(wait, kNap));
  }
  return !are_transfers_aborted();
}

void Retries::note_progress() {
  num_without_progress_ = 0;
  asked_ = {};
  begin_ = std::chrono::steady_clock::now();
}

}  // namespace tessera::object_store
