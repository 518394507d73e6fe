#include "runtime/support/processes.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace tessera::test {
namespace {

constexpr const char* kRank = "TESSERA_TEST_RANK";
constexpr const char* kWorldSize = "TESSERA_TEST_WORLD_SIZE";
constexpr const char* kFolder = "TESSERA_TEST_FOLDER";
constexpr const char* kTimeout = "TESSERA_TEST_TIMEOUT_MS";
constexpr const char* kStoreInRank0 = "TESSERA_TEST_STORE_IN_RANK0";  // set: StorePlace::rank0
constexpr unsigned kSecondsToLive = 60;  // then SIGALRM kills a rank that hangs

std::string path_of(const std::string& folder, int rank) {
  return folder + "/said-" + std::to_string(rank);
}

/// Returns a connection to the store in rank 0. Rank 0 writes the store's port to a file; the other
/// ranks wait for this file.
c10::intrusive_ptr<c10d::Store> store_in_rank0(const std::string& folder, int rank,
                                               int world_size) {
  const std::string path = folder + "/port";
  c10d::TCPStoreOptions options;
  options.port = 0;  // any
  options.isServer = rank == 0;
  options.numWorkers = world_size;
  options.waitWorkers = false;
  if (rank != 0) {
    while (!std::filesystem::exists(path)) ::usleep(5'000);
    std::ifstream(path) >> options.port;
  }
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  if (rank == 0) {
    std::ofstream(path + ".partial") << store->getPort();
    std::filesystem::rename(path + ".partial", path);
  }
  return store;
}

c10::intrusive_ptr<c10d::Store> make_store(const std::string& folder, int rank, int world_size) {
  if (std::getenv(kStoreInRank0) != nullptr) return store_in_rank0(folder, rank, world_size);
  return c10::make_intrusive<c10d::FileStore>(folder + "/store", world_size);
}

}  // namespace

std::vector<std::string> run_processes(int world_size, const std::string& disabled_test,
                                       const ProcessOptions& options) {
  std::string folder = std::filesystem::temp_directory_path() / "tessera-ranks-XXXXXX";
  EXPECT_NE(::mkdtemp(folder.data()), nullptr);
  std::vector<pid_t> children;
  for (int rank = 0; rank < world_size; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv(kRank, std::to_string(rank).c_str(), 1);
      ::setenv(kWorldSize, std::to_string(world_size).c_str(), 1);
      ::setenv(kFolder, folder.c_str(), 1);
      ::setenv(kTimeout, std::to_string(options.timeout.count()).c_str(), 1);
      if (options.store == StorePlace::rank0) ::setenv(kStoreInRank0, "1", 1);
      for (const auto& [name, value] : options.environment) {
        ::setenv(name.c_str(), value.c_str(), 1);
      }
      // Else the test may be of another shard than the parent.
      ::unsetenv("GTEST_TOTAL_SHARDS");
      ::unsetenv("GTEST_SHARD_INDEX");
      ::execl("/proc/self/exe", "runtime_tests", "--gtest_also_run_disabled_tests",
              ("--gtest_filter=" + disabled_test).c_str(), "--gtest_brief=1", nullptr);
      ::_exit(127);
    }
    children.push_back(child);
  }
  std::vector<std::string> said;
  for (int rank = 0; rank < world_size; ++rank) {
    int status = 0;
    EXPECT_EQ(::waitpid(children[static_cast<std::size_t>(rank)], &status, 0),
              children[static_cast<std::size_t>(rank)]);
    const bool has_ended_well = rank == options.doomed
                                    ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                                    : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    EXPECT_TRUE(has_ended_well) << "rank " << rank << ": " << status;
    std::ifstream file(path_of(folder, rank));
    said.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::filesystem::remove_all(folder);
  return said;
}

void as_process(const std::function<std::string(const dist::Mesh&)>& body) {
  const char* const rank_text = std::getenv(kRank);
  const char* const world_size_text = std::getenv(kWorldSize);
  const char* const folder_text = std::getenv(kFolder);
  ASSERT_TRUE(rank_text && world_size_text && folder_text)
      << "only run_processes can run this test";
  ::alarm(kSecondsToLive);
  at::set_num_threads(1);
  const std::string folder = folder_text;
  const int rank = std::stoi(rank_text);
  const int world_size = std::stoi(world_size_text);
  dist::MeshOptions options;
  options.transport = dist::gloo("lo");
  options.timeout = std::chrono::milliseconds(std::stoi(std::getenv(kTimeout)));
  const dist::Mesh mesh =
      dist::connect(make_store(folder, rank, world_size), rank, world_size, options);
  std::ofstream(path_of(folder, rank)) << body(mesh);
}

}  // namespace tessera::test
