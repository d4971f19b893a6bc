package doctor

import (
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/launcher"
)

// torchrunPlace returns a machine on which torchrun started ranks.
func torchrunPlace() (*launcher.Place, error) {
	return &launcher.Place{
		Launcher: launcher.Torchrun, Rank: 5, Size: 8, LocalRank: 1, LocalSize: 4, LocalKnown: true,
		Host: "gpu-17", Leader: "gpu-16", Restart: 2,
	}, nil
}

// withMPI returns known libraries with MPI libraries in place of the MPI that is missing.
func withMPI(versions ...string) func() []Library {
	return func() []Library {
		ls := known()
		mpi := ls[2]
		ls = ls[:2]
		for _, v := range versions {
			mpi.Version, mpi.Path = v, "/usr/lib/"+v
			ls = append(ls, mpi)
		}
		return ls
	}
}

func TestLauncher(t *testing.T) {
	p := probe()
	p.Place = torchrunPlace
	p.Libraries = withMPI("Open MPI v4.1.4", "MPICH 4.0.2")
	compare(t, "launcher.txt", Examine(p))

	p.Libraries = withMPI("Open MPI v4.1.4")
	r := Examine(p)
	last := r.Missing[len(r.Missing)-1]
	if last.What != "launcher" || !strings.HasPrefix(last.Why, "torchrun alone cannot start Open MPI") || last.Do != "start with mpirun or with srun --mpi=pmix, or install MPICH" {
		t.Errorf("got %+v", last)
	}

	p.Place = func() (*launcher.Place, error) { return &launcher.Place{Size: 2, Host: "gpu-17"}, nil }
	r = Examine(p)
	last = r.Missing[len(r.Missing)-1]
	if r.Launcher.Name != "RANK and WORLD_SIZE" || !strings.HasPrefix(last.Why, "the launcher (RANK and WORLD_SIZE) alone cannot start Open MPI") {
		t.Errorf("got %+v, %+v", r.Launcher, last)
	}

	p.Place = func() (*launcher.Place, error) {
		return nil, errors.New("RANK is set, but WORLD_SIZE is not; set both")
	}
	r = Examine(p)
	if last := r.Missing[len(r.Missing)-1]; r.Launcher != nil || last.Why != "RANK is set, but WORLD_SIZE is not" || last.Do != "set both" {
		t.Errorf("got %+v, %+v", r.Launcher, last)
	}
	var text strings.Builder
	if r.Text(&text); !strings.Contains(text.String(), "unclear     see below") {
		t.Error(text.String())
	}
}

// Each kind of a library is listed once, and none if there is no other.
func TestFindKinds(t *testing.T) {
	l := Library{Name: "C"}
	if got := l.findKinds([][]string{{"libstowage-test-nobody-has-this.so"}, {"libc.so.6"}, {"libc.so.6"}}); len(got) != 1 || got[0].Path == "" {
		t.Errorf("got %+v", got)
	}
	if got := l.findKinds([][]string{{"libstowage-test-nobody-has-this.so"}}); len(got) != 1 || got[0].Path != "" || got[0].Name != "C" {
		t.Errorf("got %+v", got)
	}
}
