// Runs the fuzz targets without libFuzzer, in any build: over files, and over mutations of them
// that are the same in every run.

#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#define TESSERA_FUZZ_TARGET(name) \
  extern "C" int fuzz_one_##name(const std::uint8_t* data, std::size_t nbytes);
#include "fuzz_targets.inc"
#undef TESSERA_FUZZ_TARGET

// The sanitizers' runtime defines this; null without sanitizers.
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));
extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=1024";  // no input is larger than a few MB
}

namespace {

constexpr const char* kUsage =
    "usage: fuzz_replay TARGET [--mutations N] [--seconds N] [--seed N] [--keep FILE] PATH...\n"
    "  Feeds TARGET with the files at the paths (of folders, all in them), then with N mutations "
    "of\n"
    "  them, or for some seconds. What crashes, takes 10 s of processor time, or 2 minutes, is "
    "written\n"
    "  to FILE (default: finding).\n";
// Of processor time, which does not depend on what else the machine runs.
constexpr time_t kMaxBusySecondsPerInput = 10;
constexpr unsigned kMaxSecondsPerInput = 120;             // ends a target that waits
constexpr std::size_t kMaxNbytes = std::size_t{1} << 20;  // largest mutation

using Bytes = std::vector<std::uint8_t>;
using Run = int (*)(const std::uint8_t* data, std::size_t nbytes);

struct Target {
  std::string_view name;
  Run run;
};
constexpr Target kTargets[] = {
#define TESSERA_FUZZ_TARGET(name) {#name, fuzz_one_##name},
#include "fuzz_targets.inc"
#undef TESSERA_FUZZ_TARGET
};

// The signal handler reads these.
Bytes current_input;
std::string current_name;
std::string keep_path = "finding";

void keep_current_input() {
  std::fprintf(stderr, "fuzz_replay: %s: written to %s\n", current_name.c_str(), keep_path.c_str());
  std::ofstream(keep_path, std::ios::binary)
      .write(reinterpret_cast<const char*>(current_input.data()),
             static_cast<std::streamsize>(current_input.size()));
}

void on_signal(int number) {
  std::fprintf(
      stderr, "fuzz_replay: %s\n",
      number == SIGALRM || number == SIGPROF ? "an input takes too long" : strsignal(number));
  keep_current_input();
  _exit(1);
}

void keep_what_crashes() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigaction(SIGALRM, &action, nullptr);
  sigaction(SIGPROF, &action, nullptr);
  if (__sanitizer_set_death_callback != nullptr) {
    __sanitizer_set_death_callback(keep_current_input);
    sigaction(SIGABRT, &action, nullptr);
    return;
  }
  static std::array<char, 65536> stack;  // the crash may be an overflow of the normal stack
  const stack_t other{.ss_sp = stack.data(), .ss_flags = 0, .ss_size = stack.size()};
  sigaltstack(&other, nullptr);
  action.sa_flags = SA_ONSTACK;
  for (const int number : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    sigaction(number, &action, nullptr);
  }
}

struct Options {
  std::optional<Target> target;
  std::uint64_t num_mutations = 0;
  std::uint64_t num_seconds = 0;
  std::uint64_t seed = 1;
  std::vector<std::string> paths;
};

[[noreturn]] void refuse() {
  std::string names;
  for (const Target& target : kTargets) names += " " + std::string(target.name);
  std::fprintf(stderr, "%s  targets:%s\n", kUsage, names.c_str());
  std::exit(2);
}

Options parse(std::span<char* const> arguments) {
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view word = arguments[i];
    if (!word.starts_with("--")) {
      if (options.target) {
        options.paths.emplace_back(word);
        continue;
      }
      const auto found = std::ranges::find(kTargets, word, &Target::name);
      if (found == std::end(kTargets)) refuse();
      options.target = *found;
      continue;
    }
    if (i + 1 == arguments.size()) refuse();
    const std::string_view value = arguments[++i];
    if (word == "--keep") {
      keep_path = value;
      continue;
    }
    std::uint64_t* const number = word == "--mutations" ? &options.num_mutations
                                  : word == "--seconds" ? &options.num_seconds
                                  : word == "--seed"    ? &options.seed
                                                        : nullptr;
    if (number == nullptr ||
        std::from_chars(value.data(), value.data() + value.size(), *number).ec != std::errc()) {
      refuse();
    }
  }
  if (!options.target) refuse();
  return options;
}

struct Input {
  std::string name;
  Bytes bytes;
};

Input read_input(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  Bytes bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file.good() && !file.eof()) {
    std::fprintf(stderr, "fuzz_replay: %s cannot be read\n", path.c_str());
    std::exit(2);
  }
  return {path.string(), std::move(bytes)};
}

/// Returns the files in order of their paths.
std::vector<Input> read_inputs(const std::vector<std::string>& paths) {
  std::vector<std::filesystem::path> files;
  for (const std::string& path : paths) {
    if (!std::filesystem::is_directory(path)) {
      files.emplace_back(path);
      continue;
    }
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
  }
  std::ranges::sort(files);
  std::vector<Input> inputs;
  for (const auto& file : files) inputs.push_back(read_input(file));
  return inputs;
}

/// Changes inputs as damage or an attacker might: flips bits, sets bytes, writes extreme numbers,
/// removes ranges of bytes, and inserts ranges of the same or another input.
class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : engine_(seed) {}

  Bytes mutate(const std::vector<Input>& inputs) {
    Bytes bytes = inputs[below(inputs.size())].bytes;
    for (std::size_t left = 1 + below(4); left > 0; --left) {
      change(bytes, inputs[below(inputs.size())].bytes);
    }
    if (bytes.size() > kMaxNbytes) bytes.resize(kMaxNbytes);
    return bytes;
  }

 private:
  std::size_t below(std::size_t end) { return static_cast<std::size_t>(engine_() % end); }
  std::size_t place_in(const Bytes& bytes) { return bytes.empty() ? 0 : below(bytes.size()); }
  /// Returns a random length from 1 to `most`, at most 2048. Short ones are the most likely.
  std::size_t length_up_to(std::size_t most) {
    const std::size_t limit = std::size_t{1} << below(12);
    return most == 0 ? 0 : 1 + below(std::min(most, limit));
  }

  void change(Bytes& bytes, const Bytes& other) {
    const std::size_t at = place_in(bytes);
    switch (below(8)) {
      case 0:
        if (!bytes.empty()) bytes[at] = static_cast<std::uint8_t>(bytes[at] ^ (1U << below(8)));
        break;
      case 1:
        if (!bytes.empty()) bytes[at] = static_cast<std::uint8_t>(engine_());
        break;
      case 2:
        put_number(bytes, at);
        break;
      case 3:
        put_text(bytes, at);
        break;
      case 4:
        erase(bytes, at, length_up_to(bytes.size() - at));
        break;
      case 5:
        insert(bytes, at, bytes, place_in(bytes));
        break;
      case 6:
        insert(bytes, at, other, place_in(other));
        break;
      default:
        bytes.resize(at);
    }
  }

  /// Overwrites 1 to 8 bytes with a little-endian number.
  void put_number(Bytes& bytes, std::size_t at) {
    constexpr std::uint64_t kNumbers[] = {0,
                                          1,
                                          0x7F,
                                          0x80,
                                          0xFF,
                                          0x7FFF,
                                          0xFFFF,
                                          0x7FFFFFFF,
                                          0x80000000U,
                                          0xFFFFFFFFU,
                                          UINT64_MAX,
                                          UINT64_MAX >> 1,
                                          UINT64_MAX - 7,
                                          std::uint64_t{1} << 62,
                                          1U << 20,
                                          4096};
    std::uint64_t number = kNumbers[below(std::size(kNumbers))];
    const std::size_t end = std::min(bytes.size(), at + (std::size_t{1} << below(4)));
    for (; at < end; ++at, number >>= 8U) bytes[at] = static_cast<std::uint8_t>(number);
  }

  /// Replaces the first digits after `at` by a word; appends the word if there are no digits.
  void put_text(Bytes& bytes, std::size_t at) {
    constexpr std::string_view kWords[] = {"-1",
                                           "0",
                                           "9223372036854775807",
                                           "9223372036854775808",
                                           "18446744073709551616",
                                           "1e999",
                                           "null",
                                           "true",
                                           "\"\"",
                                           "[]",
                                           "{}",
                                           "[",
                                           "\\u0000",
                                           "\xFF",
                                           "..",
                                           "/",
                                           "1e-400"};
    const auto is_digit = [](std::uint8_t byte) { return byte >= '0' && byte <= '9'; };
    const auto first =
        std::find_if(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes.end(), is_digit);
    const auto last = std::find_if_not(first, bytes.end(), is_digit);
    const std::string_view word = kWords[below(std::size(kWords))];
    const auto place = bytes.erase(first, last);
    bytes.insert(place, word.begin(), word.end());
  }

  static void erase(Bytes& bytes, std::size_t at, std::size_t nbytes) {
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    bytes.erase(begin, begin + static_cast<std::ptrdiff_t>(nbytes));
  }

  void insert(Bytes& bytes, std::size_t at, const Bytes& from, std::size_t from_at) {
    const auto begin = from.begin() + static_cast<std::ptrdiff_t>(from_at);
    const auto nbytes = static_cast<std::ptrdiff_t>(length_up_to(from.size() - from_at));
    const Bytes copied(begin, begin + nbytes);  // `from` may be `bytes`
    bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), copied.begin(), copied.end());
  }

  std::mt19937_64 engine_;
};

void limit_time(time_t busy_seconds, unsigned seconds) {
  const itimerval limit{.it_interval = {}, .it_value = {.tv_sec = busy_seconds, .tv_usec = 0}};
  setitimer(ITIMER_PROF, &limit, nullptr);
  alarm(seconds);
}

void feed(const Target& target, std::string name, Bytes bytes) {
  current_name = std::move(name);
  current_input = std::move(bytes);
  limit_time(kMaxBusySecondsPerInput, kMaxSecondsPerInput);
  target.run(current_input.data(), current_input.size());
  limit_time(0, 0);
}

/// Runs the mutations, at least for `num_seconds`. Returns how many were run.
std::uint64_t feed_mutations(const Options& options, const std::vector<Input>& inputs) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(options.num_seconds);
  Mutator mutator(options.seed);
  std::uint64_t number = 0;
  while (number < options.num_mutations || std::chrono::steady_clock::now() < end) {
    feed(*options.target, "mutation " + std::to_string(number), mutator.mutate(inputs));
    ++number;
  }
  return number;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse({argv + 1, argv + std::max(argc, 1)});
  const std::vector<Input> inputs = read_inputs(options.paths);
  if (inputs.empty()) {
    std::fprintf(stderr, "fuzz_replay: no inputs\n");
    return 2;
  }
  keep_what_crashes();
  for (const Input& input : inputs) feed(*options.target, input.name, input.bytes);
  const std::uint64_t num_mutations = feed_mutations(options, inputs);
  std::printf("%s: %zu inputs, %llu mutations\n", std::string(options.target->name).c_str(),
              inputs.size(), static_cast<unsigned long long>(num_mutations));
  return 0;
}
