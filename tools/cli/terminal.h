#pragma once

#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera::cli {

enum class ColorChoice { automatic, always, never };
enum class Style : std::uint8_t { plain, strong, faint, good, bad, notice };

/// Thrown if the reader of standard output has closed the pipe.
class OutputClosed : public std::runtime_error {
 public:
  OutputClosed() : std::runtime_error("standard output was closed") {}
};

/// The output of a tool: results go to standard output, everything else to standard error. Output
/// is buffered: it is written by `flush()`, by the destructor, when the buffer is full, and before
/// `print_error` prints. Thread-safe. Ignores SIGPIPE and SIGXFSZ from construction on.
class Terminal {
 public:
  Terminal() : Terminal(1, 2) {}
  /// Prints to other file descriptors, which the caller owns.
  Terminal(int out_fd, int err_fd);
  ~Terminal();  // flushes; ignores errors
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  /// Prints `text` to standard output, unchanged. Throws: OutputClosed, Error(io).
  void print(std::string_view text);
  /// Prints one line to standard error. Never throws: no stream is left to report an error on.
  void print_error(std::string_view line) noexcept;
  /// Prints a line for programs to standard error immediately. Does not flush buffered output
  /// first.
  void print_event(std::string_view line) noexcept;
  /// Throws: OutputClosed, Error(io).
  void flush();

  /// Shows `line` as the terminal's last line in place of the previous status, cut to the width. An
  /// empty `line` clears the status. Does nothing unless standard error is a terminal.
  void show_status(std::string_view line);

  bool output_is_terminal() const { return output_is_terminal_; }
  bool errors_are_on_terminal() const { return errors_are_on_terminal_; }

  /// Returns the width in columns: the terminal's, else the variable COLUMNS, else 80.
  int width() const { return width_; }

  /// Sets whether output has colours. `automatic`: only on a terminal, and not if NO_COLOR is set
  /// (and not empty), or TERM is `dumb` or not set.
  void set_color(ColorChoice choice);
  /// Returns `text` in this style, or unchanged if standard output has no colour.
  std::string styled(Style style, std::string_view text) const;

 private:
  void flush_locked();
  void clear_status_locked() noexcept;

  const int out_fd_;
  const int err_fd_;
  bool output_is_terminal_;
  bool errors_are_on_terminal_;
  bool color_ = false;
  int width_ = 80;
  std::mutex mutex_;
  std::string buffer_;
  std::string status_;
  bool output_closed_ = false;
};

/// Returns the columns that UTF-8 text takes: its code points.
std::size_t display_width(std::string_view text);

/// Returns the text if it fits in `max_width` columns, else `…` and the end that still fits:
/// the end of a name tells more than its beginning.
std::string shorten_front(std::string_view text, std::size_t max_width);

}  // namespace tessera::cli
