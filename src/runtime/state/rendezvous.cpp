#include "runtime/state/rendezvous.h"

#include <algorithm>
#include <exception>

#include "runtime/dist/message.h"
#include "runtime/state/load_problems.h"
#include "tessera/base/error.h"

namespace tessera::state {
namespace {

constexpr char kSaid = '+';    // first byte of an answer that has the ranks' texts
constexpr char kFailed = '-';  // first byte of an answer that has the reason of a failure

std::string join(const std::vector<std::string>& texts) {
  std::string joined;
  for (const std::string& text : texts) {
    joined += std::to_string(text.size()) + ":" + text;
  }
  return joined;
}

std::vector<std::string> split(const std::string& joined) {
  std::vector<std::string> texts;
  for (std::size_t at = 0; at < joined.size();) {
    const std::size_t colon = joined.find(':', at);
    const std::size_t nbytes = std::stoull(joined.substr(at, colon - at));
    texts.push_back(joined.substr(colon + 1, nbytes));
    at = colon + 1 + nbytes;
  }
  return texts;
}

std::vector<std::uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

/// Returns a text with the kind and the message of an error, to send it to other ranks.
std::string failure_text(const std::exception& error) {
  const auto* const ours = dynamic_cast<const Error*>(&error);
  const ErrorKind kind = ours != nullptr ? ours->kind() : ErrorKind::io;
  return std::string(1, kFailed) + std::to_string(static_cast<int>(kind)) + " " + error.what();
}

[[noreturn]] void rethrow_failure(const std::string& text, const std::string& where) {
  const std::size_t space = text.find(' ');
  rethrow_text(static_cast<ErrorKind>(std::stoi(text.substr(1, space - 1))),
               where + ": " + text.substr(space + 1));
}

}  // namespace

Rendezvous::Rendezvous(const dist::Mesh& mesh) : rank_(mesh.rank()), size_(mesh.world_size()) {
  if (size_ == 1) return;
  name_ = "state/" + std::to_string(mesh.world()->next_number()) + "/";
  store_ = mesh.world()->store()->clone();
  set_timeout(mesh.world()->store()->getTimeout());
}

// Rank 0 waits for `timeout` and sends an error that names the late rank. The other ranks wait a
// little longer, so that they get this error.
void Rendezvous::set_timeout(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);
  if (timeout <= timeout.zero()) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "timeout", "more than 0 ms",
                          std::to_string(timeout.count()) + " ms");
  }
  timeout = std::min(timeout, kLongest);
  timeout_ = rank_ == 0 ? timeout : timeout + timeout / 2 + std::chrono::seconds(1);
}

// Waits for the value of a key and returns it. Passes the time-out with the call, and does
// not set it in the store, because ranks that are threads may share the store.
std::string Rendezvous::get(const std::string& key) const {
  store_->wait({key}, timeout_);
  const std::vector<std::uint8_t> bytes = store_->get(key);
  return {bytes.begin(), bytes.end()};
}

std::vector<std::string> Rendezvous::exchange(const std::string& own, const std::string& what) {
  if (size_ == 1) return {own};
  if (!failure_.empty()) throw Error(ErrorKind::io, {}, failure_);
  const std::string prefix = name_ + std::to_string(number_) + "/";
  try {
    if (rank_ == 0) return collect(prefix, own, what);
    store_->set(prefix + std::to_string(rank_), bytes_of(own));
    std::string answer;
    try {
      answer = get(prefix + "all");
    } catch (const std::exception& error) {
      throw Error(ErrorKind::io, {},
                  "rank " + std::to_string(rank_) + ": " + what +
                      ": rank 0 sent no answer: " + dist::message_of(error));
    }
    const bool has_failed = answer.front() == kFailed;
    acknowledge(prefix, has_failed ? size_ - 2 : size_ - 1);  // one rank was late
    ++number_;
    if (has_failed) throw Error(ErrorKind::io, {}, answer.substr(1));
    return split(answer.substr(1));
  } catch (const Error& error) {
    failure_ = error.what();
    throw;
  } catch (const std::exception& error) {  // of the store
    failure_ = "rank " + std::to_string(rank_) + ": " + what + ": " + dist::message_of(error);
    throw Error(ErrorKind::io, {}, failure_);
  }
}

std::vector<std::string> Rendezvous::all_gather(const std::string& what,
                                                const std::function<std::string()>& body) {
  std::exception_ptr own;
  std::string said(1, kSaid);
  try {
    said += body();
  } catch (const std::exception& error) {
    own = std::current_exception();
    said = failure_text(error);
  }
  std::vector<std::string> all = exchange(said, what);
  if (own) std::rethrow_exception(own);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].front() != kFailed) continue;
    rethrow_failure(all[rank], what + ": rank " + std::to_string(rank));
  }
  for (std::string& text : all) text.erase(0, 1);
  return all;
}

/// Tells rank 0 that this rank has read its answer. `num_readers`: how many ranks do.
void Rendezvous::acknowledge(const std::string& prefix, int num_readers) const {
  try {
    if (store_->add(prefix + "read", 1) == num_readers) store_->set(prefix + "all read", "+");
  } catch (const std::exception&) {
    // Ignored: this rank has the answer. Rank 0 waits in vain, but not for long.
  }
}

/// Waits until the other ranks have read rank 0's answer: the store may be in the process of rank
/// 0, which may end as soon as its save returns.
void Rendezvous::wait_until_read(const std::string& prefix) const {
  constexpr std::chrono::milliseconds kLongest = std::chrono::seconds(10);
  try {
    store_->wait({prefix + "all read"}, std::min(timeout_, kLongest));
  } catch (const std::exception&) {
    // Ignored: if a rank has died, the next exchange says so.
  }
}

void Rendezvous::delete_keys(const std::string& prefix) const {
  try {
    for (const char* const key : {"all", "read", "all read"}) store_->deleteKey(prefix + key);
    for (int rank = 1; rank < size_; ++rank) store_->deleteKey(prefix + std::to_string(rank));
  } catch (const std::exception&) {
    // Ignored: the exchange is complete.
  }
}

/// Rank 0's part of `exchange`: collects the texts, and sends them to all ranks.
std::vector<std::string> Rendezvous::collect(const std::string& prefix, const std::string& own,
                                             const std::string& what) {
  std::vector<std::string> texts = {own};
  for (int rank = 1; rank < size_; ++rank) {
    try {
      texts.push_back(get(prefix + std::to_string(rank)));
    } catch (const std::exception& error) {
      const std::string failure =
          what + ": rank " + std::to_string(rank) + " sent no answer: " + dist::message_of(error);
      try {
        store_->set(prefix + "all", bytes_of(kFailed + failure));
      } catch (const std::exception&) {
        // Ignored: the store cannot be reached, so the other ranks will time out.
      }
      if (size_ > 2) wait_until_read(prefix);
      throw Error(ErrorKind::io, {}, "rank 0: " + failure);
    }
  }
  store_->set(prefix + "all", bytes_of(kSaid + join(texts)));
  wait_until_read(prefix);
  // The keys of the previous exchange can be deleted: all ranks have sent a message for this one,
  // so they have read the previous answer.
  if (number_ > 0) delete_keys(name_ + std::to_string(number_ - 1) + "/");
  ++number_;
  return texts;
}

}  // namespace tessera::state
