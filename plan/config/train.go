// This file owns the flags of `stowage train` for a setup.

package config

import (
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/plan"
)

// TrainFlags are the arguments that ask `stowage train` for a setup. Its ranks
// divide pipeline, experts and data; tensor and context parallelism it has not.
func TrainFlags(s *plan.Setup) []string {
	l, out := s.Layout, []string{}
	set := func(name string, values ...string) { out = append(append(out, "--"+name), values...) }
	count := func(name string, n int) { set(name, strconv.Itoa(n)) }
	if s.Model.Name != "" {
		set("model", s.Model.Name)
	}
	count("pp", l.PP)
	if l.VPP > 1 {
		count("vpp", l.VPP)
	}
	if l.EP > 1 {
		count("ep", l.EP)
	}
	count("dp", l.DP())
	count("microbatches", s.Batch.Global/(s.Batch.Micro*l.DP()))
	if len(s.Recompute.Modules) > 0 {
		set("recompute-modules", strings.Join(s.Recompute.Modules, ","))
	}
	if o := s.Offload; len(o.Modules) > 0 {
		set("offload-modules", strings.Join(o.Modules, ","))
		switch {
		case len(o.Fractions) > 0:
			var list []string // by pipeline rank
			for _, f := range o.Fractions {
				list = append(list, strconv.FormatFloat(f, 'g', -1, 64))
			}
			set("activation-offload-fraction", strings.Join(list, ","))
		case o.Fraction > 0 && o.Fraction < 1:
			set("activation-offload-fraction", strconv.FormatFloat(o.Fraction, 'g', -1, 64))
		}
		if o.MinElements > 0 {
			set("min-offloaded-tensor-size", strconv.FormatInt(o.MinElements, 10))
		}
		if o.Delta > 0 {
			set("delta-offload-bytes-across-pp-ranks", strconv.FormatInt(o.Delta, 10))
		}
		if o.MaxInflight > 0 {
			count("fine-grained-offloading-max-inflight-offloads", o.MaxInflight)
		}
	}
	if len(s.Stash.Modules) > 0 {
		set("stash-modules", strings.Join(s.Stash.Modules, ","))
	}
	if len(s.Graph.Scopes) > 0 {
		set("graph", strings.Join(s.Graph.Scopes, ","))
	}
	if l.FSDP.Shard == plan.ShardParameters {
		pool := l.FSDP.Pool
		if pool == "" {
			pool = "dynamic"
		}
		set("pool", pool)
	}
	if s.Budget > 0 {
		set("budget", strconv.FormatInt(s.Budget, 10))
	}
	return out
}
