// Saves and loads one tensor in the native format, on one thread, and says how long that takes:
//   native_compression save VALUES DTYPE DIRECTORY COMPRESSION ROUNDS
//   native_compression load DIRECTORY ROUNDS
//   native_compression load-part DIRECTORY     the second eighth of the tensor
// VALUES is a file of elements. Prints JSON. Seconds are those of the calls; a save includes the
// sync to the disk.

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "base/json.h"
#include "tessera/base/error.h"
#include "tessera/formats/native.h"

namespace {

using namespace tessera;
using namespace tessera::formats;

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

std::uint64_t nbytes_of_files(const std::string& directory) {
  std::uint64_t nbytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    nbytes += entry.file_size();
  }
  return nbytes;
}

/// Returns the bytes that this process has read from files, from the page cache or from a disk.
std::uint64_t nbytes_read() {
  std::ifstream counters("/proc/self/io");
  std::string name;
  std::uint64_t value = 0;
  while (counters >> name >> value) {
    if (name == "rchar:") return value;
  }
  throw Error(ErrorKind::unsupported, {}, "/proc/self/io: no rchar");
}

void print(const std::vector<double>& seconds, std::uint64_t nbytes, std::uint64_t other_nbytes,
           const char* other_name) {
  std::cout << R"({"seconds": [)";
  for (std::size_t i = 0; i < seconds.size(); ++i) std::cout << (i > 0 ? ", " : "") << seconds[i];
  std::cout << R"(], "nbytes": )" << nbytes << ", \"" << other_name << "\": " << other_nbytes
            << "}\n";
}

int save(const std::string& values_path, const std::string& dtype_text,
         const std::string& directory, const std::string& compression, int rounds) {
  const auto dtype = parse_dtype(dtype_text);
  const auto options = parse_compression(compression);
  if (!dtype || !options) throw Error(ErrorKind::invalid_argument, {}, "dtype or compression");
  const std::string text =
      read_file(FileSystem::posix(), values_path, std::filesystem::file_size(values_path));
  const auto bytes = std::as_bytes(std::span(text));
  const std::uint64_t element_nbytes = itemsize(*dtype);

  CheckpointContents contents;
  contents.world_size = 1;
  TensorEntry& tensor = contents.tensors.emplace_back();
  tensor.meta = {"weight", *dtype, {static_cast<std::int64_t>(bytes.size() / element_nbytes)}};
  tensor.pieces = {{whole_box(tensor.meta.shape), 0}};

  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) {
    const Stopwatch stopwatch;
    const auto writer = create_native(FileSystem::posix(), directory, contents, {},
                                      OverwritePolicy::replace, *options);
    for (const auto piece : writer->write_order()) {
      const std::int64_t block_numel = writer->block_numel(piece);
      for (std::int64_t begin = 0; begin < tensor.meta.numel(); begin += block_numel) {
        const std::int64_t numel = std::min(block_numel, tensor.meta.numel() - begin);
        writer->write_block(piece, begin,
                            bytes.subspan(static_cast<std::uint64_t>(begin) * element_nbytes,
                                          static_cast<std::uint64_t>(numel) * element_nbytes));
      }
    }
    writer->commit();
    seconds.push_back(stopwatch.seconds());
  }
  print(seconds, bytes.size(), nbytes_of_files(directory), "stored_nbytes");
  return 0;
}

int load(const std::string& directory, int rounds) {
  const auto opened = open_native(FileSystem::posix(), directory);
  const TensorEntry& tensor = opened->contents().tensors.front();
  std::vector<std::byte> out(tensor.meta.nbytes());
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) {
    const Stopwatch stopwatch;
    const auto reader = open_native(FileSystem::posix(), directory);
    reader->read_piece(0, 0, {0, tensor.meta.numel()}, out);
    seconds.push_back(stopwatch.seconds());
  }
  print(seconds, out.size(), nbytes_of_files(directory), "stored_nbytes");
  return 0;
}

int load_part(const std::string& directory) {
  const auto reader = open_native(FileSystem::posix(), directory);
  const TensorEntry& tensor = reader->contents().tensors.front();
  const std::int64_t numel = tensor.meta.numel() / 8;
  std::vector<std::byte> out(static_cast<std::uint64_t>(numel) * itemsize(tensor.meta.dtype));
  const std::uint64_t before = nbytes_read();
  const Stopwatch stopwatch;
  reader->read_piece(0, 0, {numel, 2 * numel}, out);
  const double seconds = stopwatch.seconds();
  print({seconds}, out.size(), nbytes_read() - before, "nbytes_read");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() == 6 && words[0] == "save") {
      return save(words[1], words[2], words[3], words[4], std::stoi(words[5]));
    }
    if (words.size() == 3 && words[0] == "load") return load(words[1], std::stoi(words[2]));
    if (words.size() == 2 && words[0] == "load-part") return load_part(words[1]);
    std::cerr << "native_compression: wrong arguments; see the top of its source\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "native_compression: " << error.what() << '\n';
    return 1;
  }
}
