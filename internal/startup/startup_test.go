package startup_test

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	_ "github.com/stowage-dev/stowage/internal/startup"
)

// early names a signal that the process sends itself before main, while its variables are made.
const early = "STOWAGE_TEST_EARLY"

var _ = signalled(os.Getenv(early))

func signalled(name string) bool {
	for _, sig := range signals {
		if name == sig.String() {
			_ = syscall.Kill(os.Getpid(), sig)
			time.Sleep(time.Minute)
		}
	}
	return true
}

var signals = []syscall.Signal{syscall.SIGQUIT, syscall.SIGABRT}

// A signal at which Go would print its stacks ends a program quietly even before main.
func TestEndsQuietly(t *testing.T) {
	for _, sig := range signals {
		cmd := exec.Command(os.Args[0], "-test.run=^$")
		cmd.Env = append(os.Environ(), early+"="+sig.String())
		var said strings.Builder
		cmd.Stdout, cmd.Stderr = &said, &said
		_ = cmd.Run() // the code tells
		if code := cmd.ProcessState.ExitCode(); code != 128+int(sig) || said.Len() > 0 {
			t.Errorf("%v: code %d, output %.200q", sig, code, said.String())
		}
	}
}
