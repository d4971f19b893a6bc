// This file owns the test that the limit on host memory holds.

package search

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
)

// The limit on host memory holds for what the full forecast says, not only for
// what the linear model expects.
func TestHostLimitHolds(t *testing.T) {
	s := small(t)
	s.Layout.NodeGPUs = 1
	p, err := plan.Predict(s)
	if err != nil {
		t.Fatal(err)
	}
	budget := p.Reserved.High
	found := 0
	for _, share := range []memory.Bytes{98, 90, 80, 70} {
		for _, host := range []memory.Bytes{1, 4, 8, 12, 16, 24} {
			host *= budget / 100
			s.HostMemory = host
			r, err := Policy(s, Options{Budget: budget * share / 100})
			var small *TooSmall
			if errors.As(err, &small) {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			p, err := plan.Predict(r.Setup)
			if err != nil {
				t.Fatal(err)
			}
			if !p.Fits {
				t.Errorf("%d %%, host %d: the answer does not fit", share, host)
			}
			for i := range p.Ranks {
				if p.Ranks[i].Host > 0 {
					found++
				}
				if p.Ranks[i].Host > host {
					t.Errorf("%d %%, host %d: rank %d has %d there", share, host, i, p.Ranks[i].Host)
				}
			}
		}
	}
	s.HostMemory = 0
	_, err = Policy(s, Options{Budget: 1e6})
	var small *TooSmall
	if !errors.As(err, &small) {
		t.Fatal(err)
	}
	// The size in the sentence is enough.
	tenths := math.Ceil(float64(small.Least) / float64(memory.GiB) * 10)
	if text := fmt.Sprintf("%.1f GiB", tenths/10); !strings.Contains(err.Error(), text) {
		t.Errorf("%v does not say %s", err, text)
	}
	if _, err := Policy(s, Options{Budget: memory.Bytes(tenths / 10 * float64(memory.GiB))}); err != nil {
		t.Error(err)
	}
	if found == 0 {
		t.Error("nothing was offloaded, so nothing was tested")
	}
}

// Ranks of a pipeline that share a node share its memory: one may pin what another leaves.
func TestHostMemoryIsThatOfTheNode(t *testing.T) {
	s := small(t)
	p, err := plan.Predict(s)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Budget: p.Reserved.High * 80 / 100}
	free, err := Policy(s, o)
	if err != nil {
		t.Fatal(err)
	}
	p, err = plan.Predict(free.Setup)
	if err != nil {
		t.Fatal(err)
	}
	var sum, most memory.Bytes
	for _, k := range p.Ranks {
		sum, most = sum+k.Host, max(most, k.Host)
	}
	each := s.Layout.World / s.Layout.PP
	if s.Layout.PP < 2 || sum == most*memory.Bytes(s.Layout.PP) {
		t.Fatalf("all of %d ranks pin the same, so nothing is tested", s.Layout.PP)
	}
	s.Layout.NodeGPUs, s.HostMemory = s.Layout.World, sum*memory.Bytes(each)
	same, err := Policy(s, o)
	if err != nil {
		t.Fatalf("a node has what the policy pins: %v", err)
	}
	if a, b := same.After.Step.Total, free.After.Step.Total; a != b {
		t.Errorf("the step takes %v with enough host memory and %v without a limit", a, b)
	}
	s.HostMemory--
	if less, err := Policy(s, o); err == nil {
		if p, err := plan.Predict(less.Setup); err != nil || p.Node.Missing > 0 || !p.Fits {
			t.Errorf("one byte less: %+v, %v", p.Node, err)
		}
	}
}

// A refusal names the node if only its memory is too small, and not otherwise.
func TestTooSmallBlamesTheNode(t *testing.T) {
	s := small(t)
	s.Layout.OverlapEP = true // whole layers are not recomputed, so offloading helps most
	s.Layout.NodeGPUs, s.HostMemory = 1, 1
	p, err := plan.Predict(s)
	if err != nil {
		t.Fatal(err)
	}
	blamed := 0
	for _, share := range []memory.Bytes{70, 60, 50} {
		o := Options{Budget: p.Reserved.High * share / 100}
		_, err := Policy(s, o)
		var small *TooSmall
		if !errors.As(err, &small) {
			continue
		}
		free := *s
		free.HostMemory = 0
		_, err = Policy(&free, o)
		if (small.Node != nil) != (err == nil) {
			t.Errorf("%d %%: node %+v, but without the limit the error is %v", share, small.Node, err)
		}
		if small.Node != nil {
			blamed++
			if small.Node.Missing <= 0 || !strings.Contains(small.Error(), "host memory") {
				t.Errorf("%d %%: %+v: %v", share, small.Node, small)
			}
		}
	}
	if blamed == 0 {
		t.Error("no refusal was for host memory, so nothing was tested")
	}
	// The optimiser's state alone may be too much.
	s.Optimizer.PrecisionAware, s.Optimizer.OffloadFraction = true, 1
	var small *TooSmall
	if _, err := Policy(s, Options{Budget: p.Reserved.High}); !errors.As(err, &small) || small.Node == nil {
		t.Errorf("the optimiser's state in host memory: %v", err)
	}
	if _, err := Layout(s, Options{Budget: p.Reserved.High}); !errors.As(err, &small) || small.Node == nil {
		t.Errorf("layouts: %v", err)
	}
}
