#include "tessera/runtime/dist/launch.h"

#include <gmock/gmock.h>

#include <map>

#include "tessera/base/error.h"

namespace tessera::dist {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

std::optional<LaunchEnvironment> environment(const Variables& variables) {
  return launch_environment([&](const std::string& name) -> std::optional<std::string> {
    const auto it = variables.find(name);
    if (it == variables.end()) return std::nullopt;
    return it->second;
  });
}

std::string error_of(const Variables& variables) {
  try {
    environment(variables);
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

TEST(LaunchTest, WithoutALauncherThereIsNone) {
  EXPECT_EQ(environment({}), std::nullopt);
  EXPECT_EQ(environment({{"MASTER_ADDR", "a"}}), std::nullopt);
}

TEST(LaunchTest, ReadsTorchrun) {
  EXPECT_EQ(environment({{"RANK", "3"},
                         {"WORLD_SIZE", "4"},
                         {"LOCAL_RANK", "1"},
                         {"MASTER_ADDR", "node0"},
                         {"MASTER_PORT", "1234"}}),
            (LaunchEnvironment{"torchrun", 3, 4, 1, "node0", 1234}));
}

TEST(LaunchTest, ReadsMpirunOnOneHost) {
  EXPECT_EQ(environment({{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "2"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}),
            (LaunchEnvironment{"mpirun", 1, 2, 1, "127.0.0.1", 29500}));
}

TEST(LaunchTest, MpirunOnSeveralHostsNeedsAnAddress) {
  Variables variables = {{"OMPI_COMM_WORLD_RANK", "1"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_THAT(error_of(variables), HasSubstr("MASTER_ADDR"));
  variables["MASTER_ADDR"] = "node0";
  EXPECT_EQ(environment(variables)->master_address, "node0");
}

TEST(LaunchTest, ReadsSlurmSteps) {
  Variables variables = {{"SLURM_PROCID", "5"},
                         {"SLURM_NTASKS", "8"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_STEP_NODELIST", "node[07-09,12]"}};
  EXPECT_EQ(environment(variables), (LaunchEnvironment{"srun", 5, 8, 1, "node07", 29500}));
  variables["SLURM_STEP_NODELIST"] = "login,node3";
  EXPECT_EQ(environment(variables)->master_address, "login");
  variables.erase("SLURM_STEP_ID");  // a shell inside an allocation
  EXPECT_EQ(environment(variables), std::nullopt);
}

// Shows B22.
TEST(LaunchTest, WrongVariablesAreNamed) {
  EXPECT_THAT(error_of({{"RANK", "0"}}), HasSubstr("WORLD_SIZE"));
  EXPECT_THAT(error_of({{"RANK", "x"}, {"WORLD_SIZE", "2"}}),
              HasSubstr("RANK: expected a number from 0 to 1, found 'x'"));
  EXPECT_THAT(error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), HasSubstr("found '2'"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(
      error_of(
          {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "65536"}}),
      HasSubstr("MASTER_PORT"));
}

}  // namespace
}  // namespace tessera::dist
