#pragma once

#include <cstdint>
#include <optional>
#include <source_location>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera {

/// A half-open range of bytes `[begin, end)` within a file or buffer.
struct ByteRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  constexpr std::uint64_t nbytes() const { return end - begin; }
  constexpr bool empty() const { return begin == end; }
  friend constexpr bool operator==(const ByteRange&, const ByteRange&) = default;
};

/// The kind of failure, by which a caller can choose an exit code or decide to retry.
enum class ErrorKind {
  not_found,         // the named path, tensor or key does not exist
  corruption,        // bytes contradict each other, their checksum or their format
  unsupported,       // well-formed input that Tessera does not accept
  invalid_argument,  // the caller asked for something meaningless
  mismatch,          // two valid things do not fit each other (strict loading, planning)
  already_exists,    // the destination, or a path that its writer needs, exists or is in use
  io,                // the operating system or a server failed a read, a write or a sync
  interrupted,       // the user asked to stop, or a failure elsewhere stopped this thread's work
};

std::string_view to_string(ErrorKind kind);  // the enumerator's name: `not_found`

/// The place of a failure. Empty members are left out of the message.
struct ErrorWhere {
  std::string path{};                     // file or directory, as the user named it
  std::string fqn{};                      // tensor or value
  std::optional<ByteRange> byte_range{};  // within the file at `path`
};

/// What the caller can do about an error or a finding. A Remedy is data, because each program words
/// it differently: `--units FILE` on a command line, `units=` in Python, PlanOptions::units in C++.
struct Remedy {
  /// What to do.
  enum class Action {
    none,               // there is no advice
    resume_or_discard,  // resume or discard the unfinished files that an interrupted run left
    discard,            // discard the unfinished files that an interrupted run left
    give_units,         // name FSDP1's flat units, which the source does not record
    give_flat_layout,   // say which parameters FSDP1's flat vectors in the source consist of
    give_strategy,      // give a strategy for tables that the table plan does not name
    leave_out,          // leave out what the pattern `argument` selects (see NameSelection)
    allow_lossy,        // let the row-wise state of column shards be merged by a weighted mean
    use_less_memory,    // use smaller buffers, or fewer threads
    choose_source,      // in a merge: choose which source wins, or give each source a prefix
    rebuild_index,      // rebuild the index of a native checkpoint
    allow_overflow,     // choose what a cast makes of numbers that are too large
    keep_dtype,         // move without a cast, or leave out what the pattern `argument` selects
    leave_extra_files,  // do not copy files such as config.json that are no part of the checkpoint
    take_as_is,         // move one part (such as one rank's file) as if it were a whole checkpoint
    name_params,        // give the names of an optimizer's parameters in a file
    prefer_source,      // in a merge: choose which source wins
    drop_optimizer,     // leave out optimizer state
  };

  Action action = Action::none;
  std::string argument{};  // a pattern for leave_out and keep_dtype; else empty

  explicit operator bool() const { return action != Action::none; }
  friend bool operator==(const Remedy&, const Remedy&) = default;
};

/// Returns the remedy in C++ terms, in a few words; empty for Action::none.
std::string remedy_to_string(const Remedy& remedy);

/// One failure, with facts for programs and one line for people.
///
/// `what()` is `<path>: <fqn>: bytes [<begin>, <end>): <reason> (<remedy>)`, without empty parts.
/// The constructor takes the reason as `what`; `expected` and `listing` compose it.
/// Control characters are escaped, and long names are shortened.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, ErrorWhere where, std::string_view what, Remedy remedy = {});

  /// Returns an error with reason `<rule>: expected <expected>, found <found> (<likely_cause>)`.
  static Error expected(ErrorKind kind, ErrorWhere where, std::string_view rule,
                        std::string_view expected, std::string_view found,
                        std::string_view likely_cause = {});
  static Error expected(ErrorKind kind, ErrorWhere where, std::string_view rule,
                        std::string_view expected, std::string_view found, Remedy remedy);

  /// Returns an error of several lines: its reason is `what`, then the lines of `list`, indented.
  static Error listing(ErrorKind kind, ErrorWhere where, std::string_view what,
                       std::string_view list, Remedy remedy = {});

  ErrorKind kind() const noexcept { return kind_; }
  const ErrorWhere& where() const noexcept { return where_; }
  /// Returns `<reason>`: the text of `what()` without the place and the remedy.
  std::string_view reason() const noexcept;
  /// Returns what the caller can do about the error. `what()` ends with this, in C++ terms.
  const Remedy& remedy() const noexcept { return remedy_; }
  /// Returns the text of `what()` with `spelled` in place of the remedy, so that a program can use
  /// its own words. If `spelled` is empty, the result has no remedy.
  std::string line_with(std::string_view spelled) const;
  /// Returns a copy of this error whose `where().fqn` is `fqn`.
  Error at_tensor(std::string fqn) const;

 private:
  Error(ErrorKind kind, ErrorWhere where, const std::string& place, const std::string& reason,
        Remedy remedy);

  ErrorKind kind_;
  ErrorWhere where_;
  Remedy remedy_;
  std::size_t place_nbytes_;  // the text is the place, the reason, then the remedy
  std::size_t reason_nbytes_;
};

/// Thrown by TESSERA_CHECK: a bug in Tessera, never a fault of the input.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Returns `text` in a form that fits into one line of a message. Control bytes and invalid UTF-8
/// become `\xNN`. If the result would be longer than `max_nbytes`, `…` replaces its middle.
std::string printable(std::string_view text, std::size_t max_nbytes = 200);

namespace detail {
[[noreturn]] void check_failed(const char* condition, std::source_location where);
}  // namespace detail

}  // namespace tessera

/// Throws InternalError if `condition` is false, in every build type. Checks Tessera, never input.
#define TESSERA_CHECK(condition)                                                    \
  do {                                                                              \
    if (!(condition)) {                                                             \
      ::tessera::detail::check_failed(#condition, std::source_location::current()); \
    }                                                                               \
  } while (false)
