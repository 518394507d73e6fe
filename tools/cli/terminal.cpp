#include "cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

constexpr std::size_t kBufferNbytes = std::size_t{1} << 16;

bool is_terminal(int fd) {
  return ::isatty(fd) == 1;
}

int find_width(int fd) {
  winsize size{};
  if (is_terminal(fd) && ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    return size.ws_col;
  }
  if (const char* columns = std::getenv("COLUMNS")) {
    int width = 0;
    const char* end = columns + std::strlen(columns);
    const auto parsed = std::from_chars(columns, end, width);
    if (parsed.ec == std::errc() && parsed.ptr == end && width > 0) return width;
  }
  return 80;
}

bool environment_allows_color() {
  const char* no_color = std::getenv("NO_COLOR");
  if (no_color != nullptr && *no_color != '\0') return false;
  const char* term = std::getenv("TERM");
  return term != nullptr && std::string_view(term) != "dumb";
}

// Writes all of `text`. Returns 0, or the `errno` of the failure.
int write_all(int fd, std::string_view text) noexcept {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      return errno;
    }
  }
  return 0;
}

bool continues_code_point(char c) {
  return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U;
}

// Returns the bytes that the first `columns` code points take.
std::size_t prefix_nbytes(std::string_view text, std::size_t columns) {
  std::size_t i = 0;
  for (; i < text.size(); ++i) {
    if (!continues_code_point(text[i]) && columns-- == 0) break;
  }
  return i;
}

}  // namespace

Terminal::Terminal(int out_fd, int err_fd)
    : out_fd_(out_fd),
      err_fd_(err_fd),
      output_is_terminal_(is_terminal(out_fd)),
      errors_are_on_terminal_(is_terminal(err_fd)),
      width_(find_width(output_is_terminal_ || !errors_are_on_terminal_ ? out_fd : err_fd)) {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // so that write() returns an error if a file gets too large
  set_color(ColorChoice::automatic);
}

Terminal::~Terminal() {
  clear_status_locked();
  if (!output_closed_) write_all(out_fd_, buffer_);
}

void Terminal::print(std::string_view text) {
  const std::scoped_lock lock(mutex_);
  buffer_ += text;
  if (buffer_.size() >= kBufferNbytes) flush_locked();
}

void Terminal::print_error(std::string_view line) noexcept {
  try {
    const std::scoped_lock lock(mutex_);
    clear_status_locked();
    if (!output_closed_) {
      write_all(out_fd_, buffer_);
      buffer_.clear();
    }
    write_all(err_fd_, std::string(line) + "\n");
  } catch (...) {
    write_all(err_fd_, line);  // written alone, because there is no memory to append a line break
  }
}

void Terminal::print_event(std::string_view line) noexcept {
  try {
    const std::scoped_lock lock(mutex_);
    clear_status_locked();
    write_all(err_fd_, std::string(line) + "\n");
  } catch (...) {  // no memory: the line is left out
  }
}

void Terminal::flush() {
  const std::scoped_lock lock(mutex_);
  flush_locked();
}

void Terminal::flush_locked() {
  if (buffer_.empty() || output_closed_) {
    buffer_.clear();
    return;
  }
  clear_status_locked();
  const int error = write_all(out_fd_, buffer_);
  buffer_.clear();
  if (error == 0) return;
  output_closed_ = true;
  if (error == EPIPE) throw OutputClosed();
  throw Error(ErrorKind::io, {"standard output", {}, {}},
              std::string("cannot be written: ") + std::strerror(error));
}

void Terminal::show_status(std::string_view line) {
  if (!errors_are_on_terminal_) return;
  const std::scoped_lock lock(mutex_);
  const std::string cut =
      std::string(line.substr(0, prefix_nbytes(line, static_cast<std::size_t>(width_ - 1))));
  if (cut == status_) return;
  if (cut.empty()) {
    clear_status_locked();
  } else {
    status_ = cut;
    write_all(err_fd_, "\r" + cut + "\033[K");
  }
}

void Terminal::clear_status_locked() noexcept {
  if (status_.empty()) return;
  status_.clear();
  write_all(err_fd_, "\r\033[K");
}

void Terminal::set_color(ColorChoice choice) {
  color_ = choice == ColorChoice::always ||
           (choice == ColorChoice::automatic && output_is_terminal_ && environment_allows_color());
}

std::string Terminal::styled(Style style, std::string_view text) const {
  const char* code = nullptr;
  switch (style) {
    case Style::plain:
      break;
    case Style::strong:
      code = "1";
      break;
    case Style::faint:
      code = "2";
      break;
    case Style::good:
      code = "32";
      break;
    case Style::bad:
      code = "31";
      break;
    case Style::notice:
      code = "33";
      break;
  }
  if (!color_ || code == nullptr || text.empty()) return std::string(text);
  return "\033[" + std::string(code) + "m" + std::string(text) + "\033[0m";
}

std::size_t display_width(std::string_view text) {
  std::size_t width = 0;
  for (char c : text) width += continues_code_point(c) ? 0U : 1U;
  return width;
}

std::string shorten_front(std::string_view text, std::size_t max_width) {
  const std::size_t width = display_width(text);
  if (width <= max_width) return std::string(text);
  if (max_width == 0) return {};
  return "…" + std::string(text.substr(prefix_nbytes(text, width - (max_width - 1))));
}

}  // namespace tessera::cli
