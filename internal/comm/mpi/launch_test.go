// This file owns how the tests get processes: the test binary starts itself under a
// launcher, if there is one, and the processes run what the environment names.

package mpi

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/leak"
)

// role names what a started process does.
const role = "STOWAGE_MPI_TEST"

// roles are what processes do. They return an error if something is wrong.
var roles = map[string]func(p *Process) error{}

func TestMain(m *testing.M) {
	name := os.Getenv(role)
	if name == "" {
		os.Exit(m.Run())
	}
	if name == "suite" {
		os.Exit(suite(m))
	}
	err := runRole(name)
	if err != nil {
		fmt.Println("FAILED:", err)
		os.Exit(1)
	}
}

func runRole(name string) error {
	p, err := Start(os.Getenv)
	if err != nil {
		return err
	}
	if err := roles[name](p); err != nil {
		return err
	}
	return p.Finalize()
}

// starter is a program that starts processes.
type starter struct {
	name string
	args []string
	env  []string
}

// The launchers are called by the names that Debian's alternatives do not change.
var launchers = []starter{
	{"mpirun.openmpi", []string{"--allow-run-as-root", "--oversubscribe", "--bind-to", "none"}, []string{"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"}},
	{"mpiexec.hydra", nil, nil},
}

// start runs the test binary in n processes and returns what they print. Nothing of it is
// left when the test ends.
func (l starter) start(t testing.TB, n int, does string, env []string, args ...string) (string, error) {
	t.Helper()
	path, err := exec.LookPath(l.name)
	if err != nil {
		t.Skipf("%s is not installed (packages openmpi-bin and mpich have the launchers)", l.name)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	all := append(append([]string{}, l.args...), "-n", strconv.Itoa(n), self)
	cmd := exec.CommandContext(ctx, path, append(all, args...)...)
	cmd.Env = append(append(append(os.Environ(), l.env...), env...), role+"="+does)
	cmd.SysProcAttr = leak.Child(syscall.SIGTERM)
	runtime.LockOSThread() // Linux takes the end of this thread for the end of the test
	defer runtime.UnlockOSThread()
	cmd.Cancel = func() error { // the launcher ends its processes when it is asked to
		return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
	}
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.CombinedOutput()
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // whatever is left
	if ctx.Err() != nil {
		err = fmt.Errorf("the processes hang: %w", err)
	}
	return strings.TrimSpace(string(out)), err
}
