package mpi

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// A process whose aborts are delayed can still be ended by SIGABRT from outside: the second one
// ends it.
func TestAbortFromOutside(t *testing.T) {
	const child = "STOWAGE_TEST_ABORT"
	if os.Getenv(child) != "" {
		delayAborts()
		_, _ = os.Stdout.WriteString("ready")
		time.Sleep(2 * time.Minute)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestAbortFromOutside$")
	cmd.Env = append(os.Environ(), child+"=1")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	if _, err := out.Read(make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	for sent := 0; ; sent++ {
		select {
		case err := <-done:
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGABRT || sent < 2 {
				t.Errorf("it ended with %v after %d signals", err, sent)
			}
			return
		case <-time.After(100 * time.Millisecond): // two at once may become one
			_ = cmd.Process.Signal(syscall.SIGABRT)
		}
	}
}
