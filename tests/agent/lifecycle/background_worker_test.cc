#include "agent/lifecycle/background_worker.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

namespace cuvil::agent {
namespace {

class CallJob : public BackgroundWorker::Job {
 public:
  explicit CallJob(std::function<void()> body) : body_(std::move(body)) {}
  void Run() noexcept override { body_(); }

 private:
  std::function<void()> body_;
};

TEST(BackgroundWorkerTest, RunsJobsInOrderAndHandsThemBack) {
  BackgroundWorker worker(nullptr);
  std::vector<int> order;
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(worker.Submit(std::make_shared<CallJob>([&order, i] { order.push_back(i); })).ok());
  }
  worker.Drain();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_TRUE(worker.HasFinished());
  EXPECT_EQ(worker.TakeFinished().size(), 10u);
  EXPECT_FALSE(worker.HasFinished());
}

TEST(BackgroundWorkerTest, TheWorkerIsNeverTheLastOwnerOfAJob) {
  const std::thread::id here = std::this_thread::get_id();
  std::thread::id died_on;
  struct Owner : BackgroundWorker::Job {
    explicit Owner(std::thread::id* died_on) : died_on(died_on) {}
    ~Owner() override { *died_on = std::this_thread::get_id(); }
    void Run() noexcept override {}
    std::thread::id* died_on;
  };
  BackgroundWorker worker(nullptr);
  ASSERT_TRUE(worker.Submit(std::make_shared<Owner>(&died_on)).ok());
  worker.Drain();
  EXPECT_EQ(died_on, std::thread::id());
  worker.TakeFinished();
  EXPECT_EQ(died_on, here);
}

TEST(BackgroundWorkerTest, StopReturnsWhatWasQueuedAndAllowsANewStart) {
  BackgroundWorker worker(nullptr);
  std::atomic<bool> go{false};
  std::atomic<bool> started{false};
  std::atomic<int> ran{0};
  ASSERT_TRUE(worker
                  .Submit(std::make_shared<CallJob>([&] {
                    started = true;
                    while (!go) std::this_thread::yield();
                    ++ran;
                  }))
                  .ok());
  ASSERT_TRUE(worker.Submit(std::make_shared<CallJob>([&ran] { ++ran; })).ok());
  while (!started) std::this_thread::yield();
  std::thread release([&go] { go = true; });
  worker.Stop();
  release.join();
  EXPECT_GE(ran, 1);
  EXPECT_EQ(worker.TakeFinished().size(), 2u);
  ASSERT_TRUE(worker.Submit(std::make_shared<CallJob>([&ran] { ran = 100; })).ok());
  worker.Drain();
  EXPECT_EQ(ran, 100);
}

TEST(BackgroundWorkerTest, WaitsForAJobAndForNoLongerThanAsked) {
  BackgroundWorker worker(nullptr);
  std::atomic<bool> done{false};
  std::atomic<bool> go{false};
  ASSERT_TRUE(worker
                  .Submit(std::make_shared<CallJob>([&] {
                    while (!go) std::this_thread::yield();
                    done = true;
                  }))
                  .ok());
  worker.WaitFor([&done] { return done.load(); }, std::chrono::milliseconds(5));
  EXPECT_FALSE(done);
  go = true;
  worker.WaitFor([&done] { return done.load(); }, std::chrono::minutes(1));
  EXPECT_TRUE(done);
}

TEST(BackgroundWorkerTest, ManyThreadsMaySubmit) {
  BackgroundWorker worker(nullptr);
  std::atomic<int> ran{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        ASSERT_TRUE(worker.Submit(std::make_shared<CallJob>([&ran] { ++ran; })).ok());
        if (i % 10 == 0) worker.TakeFinished();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  worker.Drain();
  EXPECT_EQ(ran, 800);
}

#if !defined(__SANITIZE_THREAD__)
// TSan does not support threads that are created after a fork of a program with threads.
BackgroundWorker* forked_worker = nullptr;

TEST(BackgroundWorkerTest, WorksOnInAForkedChild) {
  BackgroundWorker worker(nullptr);
  forked_worker = &worker;
  ASSERT_EQ(pthread_atfork([] { forked_worker ? forked_worker->BeforeFork() : void(); },
                           [] { forked_worker ? forked_worker->AfterForkInParent() : void(); },
                           [] { forked_worker ? forked_worker->AfterForkInChild() : void(); }),
            0);
  std::atomic<int> ran{0};
  for (int round = 0; round < 20; ++round) {
    // Queued jobs are in flight at the moment of the fork: both processes must finish them.
    ran = 0;
    for (int i = 0; i < 50; ++i) {
      ASSERT_TRUE(worker
                      .Submit(std::make_shared<CallJob>([&ran] {
                        usleep(20);
                        ++ran;
                      }))
                      .ok());
    }
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);
      if (!worker.EnsureRunning().ok()) _exit(2);
      worker.Drain();
      if (ran != 50 || worker.TakeFinished().size() != 50u) _exit(3);
      if (!worker.Submit(std::make_shared<CallJob>([&ran] { ran = -1; })).ok()) _exit(4);
      worker.Drain();
      _exit(ran == -1 ? 0 : 5);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    worker.Drain();
    EXPECT_EQ(ran, 50);
    worker.TakeFinished();
  }
  forked_worker = nullptr;
}
#endif

}  // namespace
}  // namespace cuvil::agent
